"""How the helper is started: which driver it speaks to."""

import sys

from kybernate.cuda import Binding
from services.checkpointer.backends.fake import fake_helper_command
from services.checkpointer.settings import CheckpointerSettings


def cuda_helper_command(binding: Binding = "auto") -> tuple[str, ...]:
    """Command line of the helper for the driver of this machine."""
    return (sys.executable, "-m", "services.checkpointer.helper", "--driver", "cuda", "--binding", binding)


def helper_command(settings: CheckpointerSettings) -> tuple[str, ...]:
    """Command line of the helper. Raises ValueError saying which setting is missing."""
    if settings.driver == "cuda":
        return cuda_helper_command(settings.cuda_binding)
    if settings.fake_driver is None:
        raise ValueError("KYB_DRIVER=fake needs KYB_FAKE_DRIVER, the fake driver's socket; on GPUs set KYB_DRIVER=cuda")
    return fake_helper_command(settings.fake_driver)
