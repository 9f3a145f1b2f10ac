"""How the helper is started: which driver it speaks to."""

import sys
from pathlib import Path

from kybernate.cuda import Binding
from kybernate.extras import dev_part_path
from services.checkpointer.settings import CheckpointerSettings

HELPER = (sys.executable, "-m", "services.checkpointer.helper")


def cuda_helper_command(binding: Binding = "auto") -> tuple[str, ...]:
    """Command line of the helper for the driver of this machine."""
    return (*HELPER, "--driver", "cuda", "--binding", binding)


def fake_helper_command(socket: Path) -> tuple[str, ...]:
    """Command line of the helper for the fake driver at ``socket``. Raises ExtraMissingError."""
    factory = dev_part_path("helper_driver", "KYB_DRIVER=fake")
    return (*HELPER, "--driver", "fake", "--factory", factory, "--socket", str(socket))


def helper_command(settings: CheckpointerSettings) -> tuple[str, ...]:
    """Command line of the helper. Raises ValueError saying which setting is missing, or ExtraMissingError."""
    if settings.driver == "cuda":
        return cuda_helper_command(settings.cuda_binding)
    if settings.fake_driver is None:
        raise ValueError("KYB_DRIVER=fake needs KYB_FAKE_DRIVER, the fake driver's socket; on GPUs set KYB_DRIVER=cuda")
    return fake_helper_command(settings.fake_driver)
