"""A platform of vLLM: its own CPU platform, with sleep mode and the worker whose memory lies on a fake GPU."""

from typing import Any

from vllm.platforms.cpu import CpuPlatform


def platform() -> str:
    """The entry point in ``vllm.platform_plugins``."""
    return "kyb_fake_gpu.FakeGpuPlatform"


class FakeGpuPlatform(CpuPlatform):
    """vLLM computes on the CPU, and may sleep."""

    def is_sleep_mode_available(self) -> bool:
        """Without it the server refuses ``--enable-sleep-mode``."""
        return True

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Name the worker before the CPU platform names its own."""
        vllm_config.parallel_config.worker_cls = "kyb_fake_gpu_worker.FakeGpuWorker"
        super().check_and_update_config(vllm_config)
