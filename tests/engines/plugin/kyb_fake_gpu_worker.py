"""vLLM's CPU worker as a process of the fake GPU driver, which counts what it computes without its memory."""

import os
import uuid
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from kybernate.dev.fakes.gpu.sync_client import SyncDriverClient, start_cuda_thread

RESIDUE_BYTES = 2 * 2**30
"""What a sleep leaves: contexts and graphs."""


class FakeGpuWorker(CPUWorker):
    """Its weights stay where they are; what a sleep gives back is memory of the seat's first GPU."""

    def init_device(self) -> None:
        """Attach and take the memory. Raises RuntimeError without room."""
        super().init_device()
        self._gpu = os.environ["KYB_FAKE_GPU"].split(",")[0]
        self._sleeps = "sleep-ignored" not in os.environ.get("KYB_FAKE_LIES", "")
        self._bytes = int(os.environ["KYB_VLLM_BYTES"]) - RESIDUE_BYTES
        self._driver = SyncDriverClient(os.environ["KYB_FAKE_DRIVER"])
        self._call("attach", seat=os.environ["KYB_GPU_SEAT"])
        start_cuda_thread()
        self._call("alloc", gpu=self._gpu, bytes=RESIDUE_BYTES)
        self._call("alloc", gpu=self._gpu, bytes=self._bytes)

    def sleep(self, level: int = 1) -> None:
        """Give back all but the residue; vLLM's own CPU worker, the liar, gives nothing back."""
        if self._sleeps:
            self._call("free", gpu=self._gpu, bytes=self._bytes)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take it again."""
        if self._sleeps:
            self._call("alloc", gpu=self._gpu, bytes=self._bytes)

    def execute_model(self, *arguments: Any, **named: Any) -> Any:
        """One step, which the driver counts as a request."""
        request = uuid.uuid4().hex
        self._call("begin", request=request)
        try:
            return super().execute_model(*arguments, **named)
        finally:
            self._call("end", request=request)

    def _call(self, name: str, **arguments: Any) -> None:
        reply = self._driver.request(name, **arguments)
        if reply["code"]:
            raise RuntimeError(f"fake GPU: {name}: {reply}")
