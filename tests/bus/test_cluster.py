"""Three servers as one bus: streams with three copies, made while the cluster is still finding its leader."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kybernate.bus.port import BusError, Entry
from kybernate.bus.setup import init, streams
from kybernate.dev.nats_server import NatsServer, free_port
from tests.bus.worlds import connected
from tests.until import until


@pytest.mark.timeout(180)
async def test_init_waits_for_a_cluster_and_keeps_what_one_server_loses(tmp_path: Path) -> None:
    found = set[int]()
    while len(found) < 6:
        found.add(free_port())
    ports, routes = sorted(found)[:3], sorted(found)[3:]
    urls = ",".join(f"nats://127.0.0.1:{port}" for port in ports)
    ways = [f"nats://127.0.0.1:{port}" for port in routes]
    cluster = ("--cluster_name", "kyb", "--routes", ",".join(ways), "--cluster")
    servers = [NatsServer(tmp_path / f"nats-{n}", ports[n], arguments=(*cluster, ways[n])) for n in range(3)]
    async with AsyncExitStack() as stack:
        making = asyncio.create_task(init(urls, 3, wait=45))  # no server runs yet
        for server in servers:
            await stack.enter_async_context(server)
        assert set(await making) == {config.name for config in streams()}
        assert await init(urls, 3, wait=20) == ()
        assert await init(urls, wait=20) == (), "without a number of servers each stays on its three"
        async with connected(urls) as bus:
            bucket = await bus.bucket("kyb_seats")
            await bucket.put("n1.s1", b"1")
            await servers[0].kill()

            async def entries() -> list[Entry]:
                """No entries while the servers elect a leader."""
                try:
                    return list(await (await bus.bucket("kyb_seats")).entries())
                except BusError:
                    return []

            found = await until(entries, what="the bucket can be read", timeout=40, interval=0.1)
            assert [entry.value for entry in found] == [b"1"]
