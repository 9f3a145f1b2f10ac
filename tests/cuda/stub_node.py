"""A machine for the helper: the fake GPU daemon, the stub libraries in front of it, and processes that use its GPUs."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from services.checkpointer.helper_pool import HelperPool
from services.checkpointer.settings import HELPER
from tests.checkpointer.world import Node, node, plain_environment

DEADLINE = 30.0


class StubNode(Node):
    """What the tests see of the machine."""

    def environment(self, **more: str) -> dict[str, str]:
        """What leads a process to this machine through NVIDIA's libraries."""
        places = {"LD_LIBRARY_PATH": str(self.stubs), "KYB_FAKE_DRIVER": str(self.socket)}
        return {**plain_environment(), **places, "KYB_DRIVER": "cuda", **more}

    @asynccontextmanager
    async def helper(self, **environment: str) -> "AsyncIterator[Helper]":
        """A pool of helpers, asked one call at a time."""
        settings = (*self.settings, *(f"{name}={value}" for name, value in environment.items()))
        async with HelperPool(("/usr/bin/env", *settings, *HELPER), self.folder / "helpers") as pool:
            yield Helper(pool)

    async def user(self, *gpus: str, gib: int = 40) -> int:
        """Start a process with that much memory on each GPU; its pid once it has it."""
        places, all_of_them = tuple(map(self.gpus.index, gpus)), tuple(range(len(self.gpus)))
        return (await self.engine("s00", gpus=places, gib=gib * len(gpus), visible=all_of_them)).pid


@dataclass
class Helper:
    """One helper at a time, replaced when it hangs."""

    pool: HelperPool

    async def call(self, verb: str, *, deadline: float = DEADLINE, **arguments: Any) -> dict[str, Any]:
        return await self.pool.call("G0", verb, deadline=deadline, **arguments)

    async def code(self, verb: str, pid: int, **arguments: Any) -> tuple[int, str]:
        """(number, name) of the result."""
        reply = await self.call(verb, pid=pid, **arguments)
        return reply["code"], reply["name"]

    async def state(self, pid: int) -> str:
        reply = await self.call("state", pid=pid)
        return str(reply.get("state", reply["name"]))


def stub_node(*, gpus: int = 2, options: tuple[str, ...] = ()) -> AbstractAsyncContextManager[StubNode]:
    """A machine with nothing on it."""
    return node("ctypes", gpus=gpus, options=options, made=StubNode)
