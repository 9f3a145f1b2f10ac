"""``kyb webhook certs``: the webhook's certificate and its authority as a Secret, and the API server's caBundle.

The key of the authority is not kept: the Secret lets its reader serve as the webhook, and sign nothing. A renewal makes
a new authority, and the one before stays trusted until all webhooks have loaded the new certificate.
"""

import asyncio
import base64
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kybernate.cli.output import CliError

if TYPE_CHECKING:
    from kybernate.kube import Kube

TRIES = 5
LOOK_SECONDS = 1.0
DAY_SECONDS = 86400
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

webhook = typer.Typer(no_args_is_help=True, help="The admission webhook.")


@webhook.callback()
def _group() -> None:
    """Keep the name of the one command."""


@webhook.command("certs")
def certs(
    secret: Annotated[str, typer.Option(help="Secret with tls.crt, tls.key and ca.crt; made when missing.")],
    service: Annotated[str, typer.Option(help="Service that the API server calls.")],
    namespace: Annotated[str, typer.Option(help="Namespace of both.")],
    configuration: Annotated[str, typer.Option(help="MutatingWebhookConfiguration that gets the caBundle.")],
    days: Annotated[int, typer.Option(min=1, help="Lifetime of a new certificate.")] = 3650,
    renew_days: Annotated[int, typer.Option(min=0, help="Renew a certificate that expires within N days.")] = 365,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the configuration to exist.")] = 60,
    service_account: Annotated[Path | None, typer.Option(help="Folder of the pod's token.")] = None,
) -> None:
    """Make the webhook's certificate when it is missing or expires soon, and set the caBundle (needs openssl)."""
    from kybernate.kube import ACCOUNT, Kube, KubeError, in_cluster

    where = in_cluster()
    if where is None:
        raise CliError("this works in a pod only (KUBERNETES_SERVICE_HOST is not set); the chart has a Job for it", 2)
    wanted = Wanted(namespace, secret, service, configuration, days, renew_days)

    async def work() -> str:
        kube = Kube(where, service_account or ACCOUNT)
        try:
            return await ensure(kube, wanted, wait, lambda why: print(f"kyb: {why}", file=sys.stderr))
        finally:
            await kube.close()

    try:
        print(asyncio.run(work()))
    except (KubeError, CertsError) as error:
        raise CliError(str(error)) from None


class CertsError(Exception):
    """No certificate can be made or stored; the text names the cause and the remedy."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The certificate to provide, and the objects that hold it."""

    namespace: str
    secret: str
    service: str
    configuration: str
    days: int = 3650
    renew_days: int = 365

    @property
    def names(self) -> tuple[str, ...]:
        """DNS names of the certificate; the API server calls the first one."""
        return f"{self.service}.{self.namespace}.svc", f"{self.service}.{self.namespace}.svc.cluster.local"


async def ensure(kube: "Kube", wanted: Wanted, wait: float, report: Callable[[str], None]) -> str:
    """Bring Secret and configuration up to date; return what was done. Raises CertsError, KubeError.

    The API server trusts a new authority before webhooks present its certificate.
    """
    from kybernate.kube import ConflictError, new_secret, secret_path, write_secret

    for _ in range(TRIES):
        present = await kube.get(secret_path(wanted.namespace, wanted.secret))
        data = _data(present)
        made = not await good(data, wanted)
        if made:
            data = {**data, **await make(wanted, old_authority=data.get("ca.crt", ""))}
        await _trust(kube, wanted, data["ca.crt"], wait, report)
        if not made:
            return f"Secret {wanted.namespace}/{wanted.secret}: the certificate is good"
        secret = present or new_secret(
            wanted.namespace, wanted.secret, kind="kubernetes.io/tls", made_by="kyb-webhook-certs"
        )
        try:
            await write_secret(kube, {**secret, "data": None}, data)  # nothing unreadable stays
        except ConflictError:  # another Job stored a certificate first: use that one
            continue
        return f"Secret {wanted.namespace}/{wanted.secret}: made a certificate for {wanted.days} days"
    raise CertsError(f"Secret {wanted.namespace}/{wanted.secret}: another client changes it all the time; try again")


async def good(data: dict[str, str], wanted: Wanted) -> bool:
    """True if the files are complete, name this service, are signed by this authority and do not expire soon."""
    if any(not data.get(key) for key in KEYS):
        return False
    with tempfile.TemporaryDirectory() as folder:
        for key in KEYS:
            (Path(folder) / key).write_text(data[key])
        check = ("verify", "-CAfile", "ca.crt", "-verify_hostname", wanted.names[0], "tls.crt")
        if (await _openssl(folder, *check))[0]:
            return False
        left = str(wanted.renew_days * DAY_SECONDS)
        return not (await _openssl(folder, "x509", "-in", "tls.crt", "-noout", "-checkend", left))[0]


async def make(wanted: Wanted, *, old_authority: str = "") -> dict[str, str]:
    """Make an authority (followed by the newest old one) and its certificate, as PEM. Raises CertsError."""
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        names = ", ".join(f"DNS:{name}" for name in wanted.names)
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-sha256", "-days", str(wanted.days))
        new = ("req", "-x509", "-config", "config", *key)
        # The two common names differ: a verifier would take a certificate with its issuer's name for self-signed.
        (at / "config").write_text(_CONFIG.format(name="kybernate-webhook-ca", names=names))
        await _must(folder, *new, "-extensions", "authority", "-keyout", "ca.key", "-out", "ca.crt")
        (at / "config").write_text(_CONFIG.format(name="kybernate-webhook", names=names))
        signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-keyout", "tls.key", "-out", "tls.crt")
        await _must(folder, *new, "-extensions", "server", *signed)
        found = {key: (at / key).read_text() for key in KEYS}
    newest, end, _ = old_authority.partition(_END)
    return {**found, "ca.crt": found["ca.crt"] + newest + end} if end else found


async def _trust(kube: "Kube", wanted: Wanted, authority: str, wait: float, report: Callable[[str], None]) -> None:
    """Write the caBundle. Raises CertsError, KubeError."""
    from kybernate.kube import ConflictError

    path = f"/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/{wanted.configuration}"
    bundle, deadline, reported = base64.b64encode(authority.encode()).decode(), time.monotonic() + wait, False
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
        elif not reported:
            report(f"MutatingWebhookConfiguration {wanted.configuration} does not exist; waiting for up to {wait:g} s")
            reported = True
        if time.monotonic() > deadline:
            raise CertsError(
                f"MutatingWebhookConfiguration {wanted.configuration} does not exist, or changes all the time; "
                f"name the right one with --configuration"
            )
        await asyncio.sleep(LOOK_SECONDS)


async def _must(folder: str, *arguments: str) -> None:
    code, output = await _openssl(folder, *arguments)
    if code:
        raise CertsError(f"openssl {arguments[0]} failed: {output.strip()}")


async def _openssl(folder: str, *arguments: str) -> tuple[int, str]:
    """Run openssl in ``folder``; return its exit code and output. Raises CertsError if it is not installed."""
    try:
        process = await asyncio.create_subprocess_exec(
            "openssl", *arguments, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
    except FileNotFoundError:
        raise CertsError(
            "openssl is not installed: take an image that has it (ca-certificates of Debian brings it), or "
            "webhook.certManager.enabled=true"
        ) from None
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode(errors="replace")


def _data(secret: dict[str, Any] | None) -> dict[str, str]:
    from kybernate.kube import secret_data

    try:
        return secret_data(secret or {})
    except ValueError:
        return {}  # counts as missing: it is replaced
