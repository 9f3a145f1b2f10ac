"""Clusters whose own authority has no key usage extension are trusted, others not."""

import asyncio
import shutil
import ssl
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from kybernate.config_errors import ConfigError
from kybernate.tls import ServerCertificate, follow_authorities, trusting
from tests.until import until

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")


def make(folder: Path, *, ca: str) -> None:
    def run(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    constraints = ("-addext", "basicConstraints=critical,CA:TRUE")
    run("req", "-x509", *key, "-keyout", f"{ca}.key", "-out", f"{ca}.crt", "-subj", f"/CN={ca}", *constraints)
    run("req", *key, "-keyout", f"{ca}-server.key", "-out", f"{ca}-server.csr", "-subj", "/CN=server")
    (folder / "ext").write_text("subjectAltName=IP:127.0.0.1\n")
    run(
        *("x509", "-req", "-in", f"{ca}-server.csr", "-CA", f"{ca}.crt", "-CAkey", f"{ca}.key", "-CAcreateserial"),
        *("-out", f"{ca}-server.crt", "-extfile", "ext"),
    )


async def shake_hands(folder: Path, *, server: str, trusted: str) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / f"{server}-server.crt", folder / f"{server}-server.key")

    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    listening = await asyncio.start_server(close, "127.0.0.1", 0, ssl=context)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(folder / f"{trusted}.crt"))
        writer.close()


async def test_an_authority_without_key_usage_is_trusted_and_another_one_is_not(tmp_path: Path) -> None:
    make(tmp_path, ca="own")
    make(tmp_path, ca="foreign")
    await shake_hands(tmp_path, server="own", trusted="own")
    with pytest.raises(ssl.SSLCertVerificationError):
        await shake_hands(tmp_path, server="foreign", trusted="own")


async def test_an_authority_of_the_machine_that_comes_later_is_trusted_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "later.crt"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    following = asyncio.create_task(follow_authorities(context))
    try:
        await asyncio.to_thread(make, tmp_path, ca="later")
        await until(lambda: context.get_ca_certs(), what="the authority is trusted", timeout=60)
    finally:
        following.cancel()
        await asyncio.wait([following])


def test_a_key_with_a_pass_phrase_is_refused_and_nobody_is_asked_for_it(tmp_path: Path) -> None:
    make(tmp_path, ca="own")
    cert, key = tmp_path / "own-server.crt", tmp_path / "own-server.key"
    command = [
        "openssl",
        "pkey",
        "-aes256",
        "-passout",
        "pass:secret",
        "-in",
        str(key),
        "-out",
        str(tmp_path / "locked"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (tmp_path / "locked").replace(key)
    with pytest.raises(ConfigError, match="its private key has a pass phrase; store it without one"):
        ServerCertificate(cert)


class Recorded:
    """A context that only notes which threads load certificates into it."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def load_cert_chain(self, *_: str, **__: object) -> None:
        self.threads.append(threading.get_ident())


async def test_a_renewed_certificate_is_loaded_in_the_thread_of_the_handshakes(tmp_path: Path) -> None:
    # OpenSSL crashes, or a handshake fails, where another thread changes the context of a handshake meanwhile.
    make(tmp_path, ca="own")
    cert = tmp_path / "own-server.crt"
    certificate = ServerCertificate(cert)
    recorded: Any = Recorded()
    certificate.context = recorded
    watching = asyncio.create_task(certificate.watch())
    try:
        await until(lambda: recorded.threads, what="the certificate is loaded", timeout=60)
    finally:
        watching.cancel()
        await asyncio.wait([watching])
    assert set(recorded.threads) == {threading.get_ident()}
