"""The real driver: the checkpoint API of libcuda, and NVML. One ``cuInit``, never a context.

A context would take VRAM and list this process among the users of the GPU. ``epoch`` is ignored: the journal refuses
stale jobs.
"""

from dataclasses import asdict
from typing import Any

from kybernate.cuda import CudaResult, gpu_pairs, init_remedy, result_name, state_name, support, why_no_checkpoint
from kybernate.cuda.ctypes_api import CheckpointApi, CudaUnavailableError
from kybernate.gpus.nvml_reader import NvmlReader
from kybernate.gpus.port import GpuError
from services.checkpointer.helper.serving import Reply, unreachable

_LASTING = {CudaResult.STUB_LIBRARY, CudaResult.SYSTEM_DRIVER_MISMATCH, CudaResult.COMPAT_NOT_SUPPORTED_ON_DEVICE}
"""Results of cuInit that depend on the loaded library, which this process cannot replace: cuInit is not repeated."""


class CudaDriver:
    """The checkpoint API and NVML, opened and initialized at the first call."""

    def __init__(self) -> None:
        self._nvml = NvmlReader(reopen=True)
        self._api: CheckpointApi | None = None
        self._init_code: int | None = None
        self._cuda_version = 0

    def call(self, verb: str, arguments: dict[str, Any]) -> Reply:
        """One call. While the driver is not ready every verb returns the reason."""
        try:
            api, trouble = self._ready()
            return trouble or self._do(api, verb, arguments)
        except (CudaUnavailableError, GpuError) as error:
            return unreachable(str(error))

    def _ready(self) -> tuple[CheckpointApi, Reply | None]:
        """The driver, and the reply to every verb while it cannot be used. Raises CudaUnavailableError."""
        if self._api is None:
            self._api = CheckpointApi()
        if self._init_code is None or (self._init_code != 0 and self._init_code not in _LASTING):
            self._cuda_version = self._api.driver_version()[1]
            self._init_code = self._api.init()
        if self._init_code != 0:
            # Not the code itself: 304 of a restore would mean a lost process, 3 of a state one that is gone.
            code = self._init_code
            return self._api, unreachable(f"cuInit answered {result_name(code)} ({code}): {init_remedy(code)}")
        if not support(self._cuda_version).checkpoint:
            return self._api, unreachable(str(why_no_checkpoint(self._cuda_version, self._driver_version())))
        return self._api, None

    def _do(self, api: CheckpointApi, verb: str, arguments: dict[str, Any]) -> Reply:
        pid = int(arguments.get("pid", 0))
        match verb:
            case "init":
                self._driver_version()  # opens NVML now rather than in the first call that needs it
                return _reply(0)
            case "describe":
                return _reply(
                    0,
                    driver=self._nvml.driver_version(),
                    cuda=self._cuda_version,
                    binding=api.binding,
                    capabilities=support(self._cuda_version)._asdict(),
                    mig={gpu.uuid: gpu.mig_enabled for gpu in self._nvml.gpus()},
                )
            case "state":
                code, state = api.state(pid)
                return _reply(code) if code else _reply(code, state=state_name(state))
            case "restore_tid":
                code, tid = api.restore_tid(pid)
                return _reply(code) if code else _reply(code, tid=tid)
            case "lock":
                return _reply(api.lock(pid, int(arguments.get("timeout_ms", 0))))
            case "checkpoint":
                return _reply(api.checkpoint(pid))
            case "restore":
                return self._restore(api, pid, arguments.get("gpu_map"))
            case "unlock":
                return _reply(api.unlock(pid))
            case "memory" | "processes" | "usage":
                return _reply(0, **self._usage(verb, arguments.get("gpus")))
        return _reply(CudaResult.INVALID_VALUE, text=f"no verb {verb!r}")

    def _usage(self, verb: str, gpus: list[str] | None) -> Reply:
        read: Reply = {}
        if verb != "memory":
            read["processes"] = [asdict(use) for use in self._nvml.gpu_processes(gpus)]
        if verb != "processes":
            read["memory"] = self._nvml.memory(gpus)
        return read

    def _restore(self, api: CheckpointApi, pid: int, moves: dict[str, str] | None) -> Reply:
        """Restore. A map is refused for drivers before 580, which ignore it and would restore without room."""
        try:
            pairs = gpu_pairs(moves) if moves else None
        except ValueError as error:
            return _reply(CudaResult.INVALID_VALUE, text=f"{error}; nothing was done")
        if pairs is not None and not support(self._cuda_version).gpu_map:
            text = "this driver cannot restore to other GPUs; needs 580 or newer; nothing was done"
            return _reply(CudaResult.NOT_SUPPORTED, text=text)
        return _reply(api.restore(pid, pairs))

    def _driver_version(self) -> str:
        try:
            return self._nvml.driver_version()
        except GpuError:
            return ""


def _reply(code: int, **members: Any) -> Reply:
    return {"code": int(code), "name": result_name(code), **members}
