"""The webhook's certificate and its own authority, as a Secret; the API server learns whom to trust.

The key of the authority is thrown away: whoever gets the Secret can play the webhook, and nothing else. A renewal
makes a new authority, and the one before stays trusted until webhooks have read the new certificate.
"""

import asyncio
import base64
import binascii
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kybernate.kube import ConflictError, Kube

TRIES = 5
LOOK_SECONDS = 1.0
DAY_SECONDS = 86400
LABELS = {"app.kubernetes.io/part-of": "kybernate", "app.kubernetes.io/managed-by": "kyb-webhook-certs"}
KEYS = ("tls.crt", "tls.key", "ca.crt")
_END = "-----END CERTIFICATE-----\n"
_CONFIG = """[req]
distinguished_name = name
prompt = no
[name]
CN = {name}
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[server]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectAltName = {names}
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
"""


class CertsError(Exception):
    """No certificate can be made or stored; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What there is to be."""

    namespace: str
    secret: str
    service: str
    configuration: str
    days: int = 3650
    renew_days: int = 365

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the certificate; the first one is what the API server calls."""
        return f"{self.service}.{self.namespace}.svc", f"{self.service}.{self.namespace}.svc.cluster.local"


async def ensure(kube: Kube, wanted: Wanted, wait: float, tell: Callable[[str], None]) -> str:
    """Bring Secret and configuration up to date; what was done. Raises CertsError, KubeError.

    The API server trusts a new authority before webhooks show its certificate.
    """
    collection = f"/api/v1/namespaces/{wanted.namespace}/secrets"
    for _ in range(TRIES):
        present = await kube.get(f"{collection}/{wanted.secret}")
        data = _data(present)
        made = not await good(data, wanted)
        if made:
            data = {**data, **await make(wanted, old_authority=data.get("ca.crt", ""))}
        await _trust(kube, wanted, data["ca.crt"], wait, tell)
        if not made:
            return f"Secret {wanted.namespace}/{wanted.secret}: the certificate is good"
        encoded = {key: base64.b64encode(text.encode()).decode() for key, text in data.items()}
        body = {**(present or _new(wanted)), "data": encoded}
        try:
            if present is None:
                await kube.create(collection, body)
            else:
                await kube.replace(f"{collection}/{wanted.secret}", body)
        except ConflictError:  # another one made one: that counts, and is to be trusted
            continue
        return f"Secret {wanted.namespace}/{wanted.secret}: made a certificate for {wanted.days} days"
    raise CertsError(f"Secret {wanted.namespace}/{wanted.secret}: somebody else writes it all the time; try again")


async def good(data: dict[str, str], wanted: Wanted) -> bool:
    """Whether these are complete, for this service, signed by this authority, and good for a while yet."""
    if any(not data.get(key) for key in KEYS):
        return False
    with tempfile.TemporaryDirectory() as folder:
        for key in KEYS:
            (Path(folder) / key).write_text(data[key])
        ask = ("verify", "-CAfile", "ca.crt", "-verify_hostname", wanted.names[0], "tls.crt")
        if (await _openssl(folder, *ask))[0]:
            return False
        left = str(wanted.renew_days * DAY_SECONDS)
        return not (await _openssl(folder, "x509", "-in", "tls.crt", "-noout", "-checkend", left))[0]


async def make(wanted: Wanted, *, old_authority: str = "") -> dict[str, str]:
    """A new authority (followed by the newest old one) and a certificate of it, PEM. Raises CertsError."""
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        names = ", ".join(f"DNS:{name}" for name in wanted.names)
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-sha256", "-days", str(wanted.days))
        new = ("req", "-x509", "-config", "config", *key)
        # Serving and signing names differ, else a verifier takes the one for the other.
        (at / "config").write_text(_CONFIG.format(name="kybernate-webhook-ca", names=names))
        await _must(folder, *new, "-extensions", "authority", "-keyout", "ca.key", "-out", "ca.crt")
        (at / "config").write_text(_CONFIG.format(name="kybernate-webhook", names=names))
        signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-keyout", "tls.key", "-out", "tls.crt")
        await _must(folder, *new, "-extensions", "server", *signed)
        found = {key: (at / key).read_text() for key in KEYS}
    newest, end, _ = old_authority.partition(_END)
    return {**found, "ca.crt": found["ca.crt"] + newest + end} if end else found


async def _trust(kube: Kube, wanted: Wanted, authority: str, wait: float, tell: Callable[[str], None]) -> None:
    """Write the caBundle. Raises CertsError, KubeError."""
    path = f"/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/{wanted.configuration}"
    bundle, deadline, told = base64.b64encode(authority.encode()).decode(), time.monotonic() + wait, False
    while True:
        configuration = await kube.get(path)
        if configuration is not None:
            hooks = configuration.get("webhooks") or []
            if all(hook["clientConfig"].get("caBundle") == bundle for hook in hooks):
                return
            for hook in hooks:
                hook["clientConfig"]["caBundle"] = bundle
            try:
                await kube.replace(path, configuration)
                return
            except ConflictError:
                pass
        elif not told:
            tell(f"MutatingWebhookConfiguration {wanted.configuration} is not there; waiting for up to {wait:g} s")
            told = True
        if time.monotonic() > deadline:
            raise CertsError(
                f"MutatingWebhookConfiguration {wanted.configuration} is not there, or changes all the time; "
                f"name the right one with --configuration"
            )
        await asyncio.sleep(LOOK_SECONDS)


async def _must(folder: str, *arguments: str) -> None:
    code, said = await _openssl(folder, *arguments)
    if code:
        raise CertsError(f"openssl {arguments[0]} failed: {said.strip()}")


async def _openssl(folder: str, *arguments: str) -> tuple[int, str]:
    """Run it there: exit code and what it said. Raises CertsError where there is none."""
    try:
        process = await asyncio.create_subprocess_exec(
            "openssl", *arguments, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
    except FileNotFoundError:
        raise CertsError(
            "openssl is not installed: take an image that has it (ca-certificates of Debian brings it), or "
            "webhook.certManager.enabled=true"
        ) from None
    said, _ = await process.communicate()
    return process.returncode or 0, said.decode(errors="replace")


def _new(wanted: Wanted) -> dict[str, Any]:
    meta = {"name": wanted.secret, "namespace": wanted.namespace, "labels": LABELS}
    return {"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls", "metadata": meta}


def _data(secret: dict[str, Any] | None) -> dict[str, str]:
    try:
        return {key: base64.b64decode(text).decode() for key, text in ((secret or {}).get("data") or {}).items()}
    except (binascii.Error, UnicodeDecodeError, TypeError):
        return {}  # made anew
