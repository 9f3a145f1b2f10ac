"""The health check of containers, against a real server."""

import asyncio
import socket
import struct
from pathlib import Path

import pytest
from aiohttp import web

from kybernate.dev.nats_server import free_port
from kybernate.health import Health
from kybernate.http.server import HttpServer

SCRIPT = Path(__file__).parents[2] / "scripts/http_ok.sh"


async def check(target: str) -> tuple[int, str]:
    """The exit code and the output."""
    process = await asyncio.create_subprocess_exec("bash", str(SCRIPT), target, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_ready_is_0_and_not_ready_is_1_with_the_reason() -> None:
    health = Health()
    reason: str | None = "no connection to the bus"
    health.conditions["bus"] = lambda: reason
    app = web.Application()
    app.add_routes(health.routes())
    async with HttpServer(app, "127.0.0.1", 0) as server:
        code, output = await check(f"{server.url}/readyz")
        assert code == 1
        assert f"{server.url}/readyz: 503" in output
        assert "no connection to the bus" in output
        reason = None
        assert await check(f"{server.url}/readyz") == (0, "")


async def test_without_a_listener_the_exit_code_is_1() -> None:
    code, output = await check(f"http://127.0.0.1:{free_port()}/readyz")
    assert code == 1
    assert "refused" in output


@pytest.mark.parametrize("reset", [False, True])
async def test_a_server_that_ends_the_connection_without_an_answer_is_not_ready(reset: bool) -> None:
    def end(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()

    async with await asyncio.start_server(end, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        for _ in range(20):  # where the end meets the request differs
            assert (await check(f"http://127.0.0.1:{port}/readyz"))[0] == 1
