"""The real services with keys on the bus and TLS between: all works, and no service requests what it may not."""

from pathlib import Path

import aiohttp

from kybernate.bus.credentials import Credentials
from kybernate.bus.keys import write
from kybernate.dev.stack import Stack, StackOptions
from tests.bus.guarded import certificates
from tests.stack.pods import pod

CONFIG = """
profiles:
  - {name: one, resource: kyb.ai/gpu-1x-seat, groupSize: 1, seatsPerGroup: 2}
"""
ROLES = {"gpu_manager": "manager", "plugin": "plugin", "router": "router", "console": "console"}


async def test_a_stack_with_keys_and_tls_serves_a_parked_model(tmp_path: Path) -> None:
    async with Stack(guarded(tmp_path)) as stack, aiohttp.ClientSession() as session:
        seats = await stack.ready(50)
        parked = next(seat for seat in seats if seat["state"] == "parked")
        body = {"model": parked["model"], "prompt": "hi", "max_tokens": 3}
        async with session.post(f"{stack.url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            assert float(answer.headers["X-Kyb-Held-Seconds"]) > 0
        for verb in ("pin", "unpin"):
            async with session.post(f"{stack.console}/v1/seats/{parked['model']}/{verb}") as answer:
                assert answer.status == 202, await answer.text()
        async with session.get(
            f"{stack.console}/v1/events?after=nothing"
        ) as answer:  # reads the stream from its beginning
            assert answer.status == 200
            await answer.content.readuntil(b"seat-")
        logs = {name: stack.logs(name) for name in stack.pids}
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
    config, pods = folder / "config.yaml", folder / "pods.yaml"
    config.write_text(CONFIG)
    pods.write_text(pod("a") + pod("b"))
    settings: dict[str, dict[str, str]] = {}
    for name, role in ROLES.items():
        files = {"KYB_NATS_CREDS_FILE": str(keys / f"{role}.nk"), "KYB_NATS_CA_FILE": str(pki / "ca.crt")}
        settings.setdefault(name, {}).update(files)
    return StackOptions(
        config=config,
        pods=pods,
        gpus=1,
        announce=False,
        speed=8,
        settings=settings,
        arguments={"nats": ("-c", str(keys / "nats.conf"))},
        init_credentials=Credentials("init", keys / "init.nk", pki / "ca.crt"),
    )
