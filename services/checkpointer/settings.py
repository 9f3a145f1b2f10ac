"""Settings of the checkpointer, and the command line of its helper that follows from them."""

import sys
from pathlib import Path

from pydantic import field_validator

from kybernate.extras import dev_part_path
from kybernate.settings import NodeSettings, OptionalFile
from services.checkpointer.backends.driver_calls import Timeouts
from services.checkpointer.core.refusals import Allowance, comma_list


class CheckpointerSettings(NodeSettings):
    """Settings of the checkpointer of one node."""

    park_allow: str = ""
    """Refusals that are lifted for this node, comma-separated: several-gpus, several-processes, nccl, managed-memory.
    The same variable in an engine's environment keeps only those that it names. See docs/dev/checkpointer.md."""
    engine_keys_dir: OptionalFile = None
    """Folder of API keys of engines: a file per key, ``namespace.name``; pods of that namespace name it by
    kyb.ai/engine-key."""
    fake_kubelet: bool = False
    """Containers are processes of the fake kubelet (``process://<pid>``). Never with a real one: anyone who may patch a
    pod's status could have any process of the node killed."""

    @property
    def timeouts(self) -> Timeouts:
        """Deadlines of driver calls."""
        return Timeouts(speed=self.speed)

    @field_validator("park_allow")
    @classmethod
    def _known(cls, text: str) -> str:
        unknown = comma_list(text) - set(Allowance)
        if unknown:
            raise ValueError(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(Allowance)}")
        return text


HELPER = (sys.executable, "-m", "services.checkpointer.helper")
"""Command line of the helper for the driver of this machine."""


def fake_helper_command(socket: Path) -> tuple[str, ...]:
    """Command line of the helper for the fake driver at ``socket``. Raises ExtraMissingError."""
    return (*HELPER, "--fake", dev_part_path("helper_driver", "KYB_DRIVER=fake"), str(socket))


def helper_command(settings: CheckpointerSettings) -> tuple[str, ...]:
    """Command line of the helper. Raises ValueError saying which setting is missing, or ExtraMissingError."""
    if not settings.fakes:
        return HELPER
    if settings.fake_driver is None:
        raise ValueError("KYB_DRIVER=fake needs KYB_FAKE_DRIVER, the fake driver's socket; on GPUs set KYB_DRIVER=cuda")
    return fake_helper_command(settings.fake_driver)
