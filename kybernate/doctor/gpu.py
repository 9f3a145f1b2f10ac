"""``kyb doctor gpu``: can processes be parked here, and what is in the way."""

from collections.abc import Mapping
from pathlib import Path

from kybernate.cuda import Binding
from kybernate.doctor.driver import read_driver
from kybernate.doctor.driver_checks import check_driver
from kybernate.doctor.finding import Finding
from kybernate.doctor.host import read_host
from kybernate.doctor.host_checks import check_host
from kybernate.extras import ExtraMissingError, dev_part


class DoctorError(Exception):
    """The doctor was asked wrongly; the text says what to do."""


def examine_gpu(
    environment: Mapping[str, str], *, binding: Binding = "auto", seconds: float = 60.0, root: Path = Path("/")
) -> list[Finding]:
    """All findings. ``seconds`` (wall) bounds what the driver may take. Raises DoctorError."""
    kind = environment.get("KYB_GPUS", "nvml")
    if kind not in ("nvml", "fake"):
        raise DoctorError(f"KYB_GPUS={kind!r}: known are nvml and fake")
    if kind == "nvml":
        driver = read_driver(environment, binding, seconds)
    else:
        socket = environment.get("KYB_FAKE_DRIVER")
        if not socket:
            raise DoctorError("KYB_GPUS=fake needs KYB_FAKE_DRIVER, the fake driver's socket")
        try:
            driver = dev_part("driver_facts", "KYB_GPUS=fake")(socket)
        except ExtraMissingError as error:
            raise DoctorError(str(error)) from error
        except OSError as error:
            raise DoctorError(f"KYB_FAKE_DRIVER={socket}: {error}") from error
    host = read_host(sorted({use.pid for use in driver.uses}), root)
    return [*check_driver(driver, host), *check_host(driver, host)]
