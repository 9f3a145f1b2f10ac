import os
import signal
from pathlib import Path

import pytest

from kybernate.dev.fakes.kubelet.process import ContainerProcess, base_environment
from kybernate.homes import Homes
from kybernate.programs import INSTALLED
from tests.control_groups import any_control_group
from tests.until import until


def test_the_packages_of_an_installed_stack_do_not_reach_its_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(INSTALLED), "/theirs")))
    assert base_environment()["PYTHONPATH"] == "/theirs"
    monkeypatch.setenv("PYTHONPATH", str(INSTALLED))
    assert "PYTHONPATH" not in base_environment()


async def test_what_a_container_leaves_in_its_group_ends_with_it(tmp_path: Path) -> None:
    """Its first process was killed: a runtime ends all of the container, an engine's children too."""
    log = tmp_path / "log"
    container = await ContainerProcess.start(("/bin/sh", "-c", "sleep 1000 & echo $!; wait"), base_environment(), log)
    await until(lambda: log.exists() and log.read_text().strip(), what="the child runs")
    child = log.read_text().strip()
    os.kill(container.pid, signal.SIGKILL)
    assert await container.wait() == 137
    await until(lambda: not Path(f"/proc/{child}").exists(), what="its child has ended")


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "killed"])
async def test_what_a_container_sends_into_the_background_is_its_own_and_ends_with_it(
    tmp_path: Path, stopped: bool
) -> None:
    """It has a session of its own, and its parent has ended."""
    log = tmp_path / "log"
    command = "(setsid sh -c 'echo $$; exec sleep 1000' &); exec sleep 1000"
    container = await ContainerProcess.start(("/bin/sh", "-c", command), base_environment(), log)
    await until(lambda: log.exists() and log.read_text().strip(), what="it is in the background")
    left = int(log.read_text())
    where = container.container_id
    await until(lambda: Homes([where]).of(left) == where, what="the first process of its container has adopted it")
    if not stopped:
        os.kill(container.pid, signal.SIGKILL)
    assert await (container.stop(5.0) if stopped else container.wait()) == (143 if stopped else 137)
    assert not Path(f"/proc/{left}/exe").exists(), "a zombie has none"


async def test_what_bears_no_mark_ends_with_its_control_group(tmp_path: Path) -> None:
    """It has a session of its own, and an empty environment."""
    log = tmp_path / "log"
    with any_control_group() as cgroups:
        command = ("/bin/sh", "-c", "env -i setsid sh -c 'echo $$; exec sleep 1000' & sleep 1000")
        container = await ContainerProcess.start(command, base_environment(), log, cgroups)
        await until(lambda: log.exists() and log.read_text().strip(), what="it is in the background")
        assert await container.stop(5.0) == 143
        assert not Path(f"/proc/{log.read_text().strip()}/exe").exists(), "a zombie has none"
