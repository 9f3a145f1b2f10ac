"""The real services with keys on the bus and TLS between: all works, and no service requests what it may not."""

from pathlib import Path

from kybernate.bus.credentials import Credentials
from kybernate.bus.keys import write
from kybernate.dev.stack import StackOptions
from tests.bus.guarded import certificates
from tests.stack.client import running
from tests.stack.pods import ONE_GROUP, pod, small_node

ROLES = {"gpu_manager": "manager", "plugin": "plugin", "router": "router", "console": "console"}


async def test_a_stack_with_keys_and_tls_serves_a_parked_model(tmp_path: Path) -> None:
    async with running(guarded(tmp_path), 50) as here:
        parked = next(model for model, row in (await here.seats()).items() if row["state"] == "parked")
        await here.answered(parked)
        for verb in ("pin", "unpin"):
            assert (await here.order(f"seats/{parked}/{verb}"))["accepted"]
        stream = f"{here.stack.console}/v1/events?after=nothing"  # from its beginning
        async with here.session.get(stream) as answer:
            assert answer.status == 200
            await answer.content.readuntil(b"seat-")
        logs = {name: here.stack.logs(name) for name in here.stack.pids}
    assert {"nats", *ROLES, "checkpointer"} <= set(logs)
    secrets = [file.read_text().strip() for file in (tmp_path / "keys").glob("*.nk")]
    for name, log in logs.items():
        assert "bus.forbidden" not in log, (name, log)
        assert "Violation" not in log, (name, log)  # as nats-server says it
        assert not any(secret in log for secret in secrets), name


def guarded(folder: Path) -> StackOptions:
    """A bus with keys that takes TLS connections only."""
    keys, pki = folder / "keys", folder / "pki"
    write(keys)
    certificates(pki)
    tls = f'tls {{ cert_file: "{pki}/server.crt", key_file: "{pki}/server.key" }}\n'
    (keys / "nats.conf").write_text(f'{tls}include "auth.conf"\n')
    ca = str(pki / "ca.crt")
    settings = {
        name: {"KYB_NATS_CREDS_FILE": str(keys / f"{role}.nk"), "KYB_NATS_CA_FILE": ca} for name, role in ROLES.items()
    }
    return small_node(
        folder, ONE_GROUP, map(pod, "ab"), speed=8, settings=settings,
        arguments={"nats": ("-c", str(keys / "nats.conf"))},
        init_credentials=Credentials("init", keys / "init.nk", pki / "ca.crt"),
    )  # fmt: skip
