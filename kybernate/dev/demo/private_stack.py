"""The demo's own stack: breaking it, seeing that it is whole, keeping its logs."""

import asyncio
import shutil
from pathlib import Path

import aiohttp

from kybernate.dev.stack import Stack
from kybernate.dev.stack.stack import unready


class StackTarget:
    """A stack as something to break."""

    def __init__(self, stack: Stack, session: aiohttp.ClientSession) -> None:
        self._stack = stack
        self._session = session
        self._starts: dict[str, int] = {}

    async def kill(self, service: str) -> None:
        """SIGKILL; a service that is just being restarted is killed as soon as it is there."""
        while True:
            starts = self._stack.starts[service]
            if self._stack.kill(service) is not None:
                self._starts[service] = starts
                return
            await asyncio.sleep(0.02)

    async def back(self, service: str) -> bool:
        """Started again since the kill, and the router answers."""
        stack = self._stack
        again = stack.starts[service] > self._starts.get(service, 0) and service in stack.pids
        return again and await answers(self._session, stack.url)

    async def pause_nats(self) -> None:
        """End the nats-server."""
        await self._stack.pause_nats()

    async def resume_nats(self) -> None:
        """Start it where it was."""
        await self._stack.resume_nats()


async def answers(session: aiohttp.ClientSession, url: str) -> bool:
    """Whether the router is there at all."""
    try:
        async with asyncio.timeout(2), session.get(f"{url}/healthz") as response:
            return response.status == 200
    except (aiohttp.ClientError, ConnectionError, TimeoutError):
        return False


async def seats_in_order(session: aiohttp.ClientSession, url: str, models: int) -> bool:
    """Whether every model has been started and is active or parked."""
    try:
        async with asyncio.timeout(2), session.get(f"{url}/v1/seats") as response:
            body = await response.json()
    except (aiohttp.ClientError, ConnectionError, TimeoutError, ValueError):
        return False
    return isinstance(body.get("seats"), list) and unready(body["seats"], models) is None


def keep_logs(stack: Stack, folder: Path) -> None:
    """Copy the logs of all processes there."""
    shutil.copytree(stack.folder / "logs", folder, dirs_exist_ok=True)
