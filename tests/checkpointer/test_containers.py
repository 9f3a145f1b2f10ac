"""The processes of a seat are those in the control group of its container, on both cgroup versions."""

import asyncio
import os
import shutil
import signal
from pathlib import Path

import pytest

from kybernate import cgroups as cgroups_module
from kybernate.cgroups import Cgroups, HiddenProcessesError, container_path, membership
from services.checkpointer import containers as containers_module
from services.checkpointer import freezer as freezer_module
from services.checkpointer import processes as processes_module
from services.checkpointer.containers import Containers
from services.checkpointer.core.failures import StepFailedError
from services.checkpointer.freezer import SIGSTOP, Freezer
from services.checkpointer.processes import ProcessIdentity, identify, stopped, thread_names
from tests.checkpointer.machine import CONTAINER, POD, SLICE, Machine, machine, target

SCOPE = f"{SLICE}/cri-containerd-{CONTAINER}.scope"


OTHER = "4e" * 32


PATHS = {
    "fs": f"/kubepods/burstable/pod{POD}/{CONTAINER}",
    "systemd": SCOPE,
    "cri-o": f"{SLICE}/crio-{CONTAINER}.scope",
    "docker": f"{SLICE}/docker-{CONTAINER}.scope",
    "namespace": f"/../../kubepods/pod{POD}/{CONTAINER}",
    "differ": f"/system.slice/containerd.service/kubepods-pod{POD.replace('-', '_')}.slice:cri-containerd:{CONTAINER}",
    "no-qos": f"/k8s.io/{CONTAINER}",
    "static-pod": f"/kubepods/burstable/pod{'ab' * 16}/{CONTAINER}",
    "nested": f"/docker/{OTHER}/kubelet/kubepods/pod{POD}/{CONTAINER}",
    "nested-systemd": (
        f"/system.slice/docker-{OTHER}.scope/kubelet.slice/kubelet-kubepods.slice/cri-containerd-{CONTAINER}.scope"
    ),
}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_the_id_alone_names_the_control_group_of_a_container(path: str) -> None:
    """A static pod has another UID on its node than in the API; without cgroupsPerQOS no group names a pod."""
    assert container_path(path, CONTAINER) == path
    assert container_path(f"{path}/workers/1", CONTAINER) == path, "control groups below it are part of it"
    assert container_path(path, "5f" * 32) is None, "another container of the pod"


@pytest.mark.parametrize(
    "path", [f"{SLICE}/crio-conmon-{CONTAINER}.scope", SLICE, f"{SLICE}/cri-containerd-{CONTAINER}0.scope", "/"]
)
def test_monitors_and_similar_names_are_not_the_container(path: str) -> None:
    assert container_path(path, CONTAINER) is None


@pytest.mark.parametrize("name", ["kubepods", "kubepods.slice", "", "abc", CONTAINER.upper(), CONTAINER[:63]])
def test_a_name_that_no_runtime_gives_names_no_container(name: str) -> None:
    """A forged status could otherwise name every process of the node."""
    assert container_path(f"/kubepods/{name}/{CONTAINER}", name) is None
    with pytest.raises(StepFailedError, match="no known id"):
        Containers().find(target(f"containerd://{name}"))


def test_a_process_on_a_hybrid_machine_has_paths_of_both_versions() -> None:
    place = membership("12:cpu,cpuacct:/a:b\n3:name=systemd:/s\n0::/u\n")
    assert list(place.items()) == [("", "/u"), ("cpu", "/a:b"), ("cpuacct", "/a:b"), ("name=systemd", "/s")]


def test_only_processes_of_the_container_are_found_the_oldest_first(m: Machine) -> None:
    m.process(50, SCOPE, start=10)
    m.process(40, f"{SCOPE}/nested", start=20)
    m.process(60, SCOPE, start=5, state="Z")
    m.process(70, f"{SLICE}/cri-containerd-{'4e' * 32}.scope")
    m.process(71, f"{SLICE}/crio-conmon-{CONTAINER}.scope")
    m.process(72, "/system.slice/sshd.service")
    containers = m.containers
    found = m.find()
    assert found.root == ProcessIdentity(pid=50, start=10)
    assert containers.processes(target(), None) == [
        ProcessIdentity(pid=50, start=10),
        ProcessIdentity(pid=40, start=20),
    ]
    assert containers.own(target(), [40, 70, 72, 99]) == [ProcessIdentity(pid=40, start=20)]
    assert containers.find(target(pod_uid="f" * 32)) == found, "of a static pod: another UID on its node"
    assert containers.find(target(f"cri-o://{'aa' * 32}")) is None


def test_a_control_group_of_the_same_name_inside_another_container_is_not_taken_for_it(m: Machine) -> None:
    """A privileged container can make any folder below its own."""
    m.process(40, f"{SLICE}/cri-containerd-{'4e' * 32}.scope{SCOPE}")
    m.process(50, SCOPE)
    found = m.find()
    assert found.root.pid == 50


def test_a_control_group_that_is_not_mounted_is_found_by_its_processes(m: Machine) -> None:
    m.process(50, SCOPE)
    containers = Containers(Cgroups(m.folder / "nothing", m.proc))
    found = containers.find(target())
    assert (found.cgroup.freezer, found.cgroup.memory) == (None, None)
    assert [one.pid for one in containers.processes(target(), None)] == [50]
    assert Freezer(containers.cgroups, 1.0).means(found.cgroup) == SIGSTOP


def test_processes_of_another_pid_namespace_are_an_error_and_not_an_empty_container(tmp_path: Path) -> None:
    m = machine(tmp_path, 2)
    m.process(50, SCOPE)
    (m.folders(SCOPE)[0] / "cgroup.procs").write_text("50\n0\n")
    with pytest.raises(StepFailedError, match="hostPID"):
        m.containers.find(target())


def test_kyb_run_is_no_process_of_its_container_and_another_process_of_its_name_is(m: Machine) -> None:
    m.process(50, SCOPE, start=10)
    (m.proc / "50" / "exe").symlink_to("/kyb/kyb-run (deleted)")
    containers, keeper = m.containers, ProcessIdentity(pid=50, start=10)
    assert containers.find(target()) is None, "kyb-run alone is no engine"
    assert containers.keeper(target()) == keeper
    m.process(60, SCOPE, start=20, parent=50)
    (m.proc / "60" / "exe").symlink_to("/kyb/kyb-run")
    found = containers.find(target(f"containerd://{CONTAINER}#call-2"))
    assert found is not None, "a start inside a container is in that container"
    assert found.root == keeper
    assert containers.processes(target(), None) == [ProcessIdentity(pid=60, start=20)]
    (m.proc / "50" / "exe").unlink()
    assert containers.keeper(target()) is None
    assert len(containers.processes(target(), None)) == 2


def test_only_what_kyb_run_started_is_the_engine_in_its_container(m: Machine) -> None:
    """``kubectl exec`` puts a process in beside it, whose parent lives outside."""
    m.process(30, "/system.slice/containerd.service")
    m.process(50, SCOPE, start=10)
    (m.proc / "50" / "exe").symlink_to("/kyb/kyb-run")
    containers = m.containers
    for pid, parent in ((60, 30), (61, 60), (62, 0)):
        m.process(pid, SCOPE, start=pid, parent=parent)
    assert containers.find(target()) is None, "a shell and what it runs are no engine"
    assert containers.keeper(target()) is not None
    assert [one.pid for one in containers.own(target(), [60, 61, 62])] == [60, 61, 62], "but are in it"
    for pid, parent in ((70, 50), (71, 70), (72, 99)):
        m.process(pid, SCOPE, start=pid, parent=parent)
    assert containers.find(target()) is not None
    assert [one.pid for one in containers.processes(target(), None)] == [70, 71, 72], "the parent of one has just ended"


@pytest.mark.parametrize("container_id", [f"containerd://{CONTAINER}", "process://60"])
def test_a_process_that_nothing_shows_the_place_of_may_be_in_the_container(tmp_path: Path, container_id: str) -> None:
    m, mine = machine(tmp_path, 2), target(container_id)
    m.process(50, f"{SLICE}/cri-containerd-{OTHER}.scope")
    m.process(55, f"/kubepods/pod{'5f' * 16}/{OTHER}")
    containers = m.containers
    assert containers.unclear(mine, [55]) == "", "it is in another pod"
    assert "pid 50 is in its pod, and not in its container" in containers.unclear(mine, [55, 50])
    assert "/proc/77/cgroup cannot be read (No such file or directory)" in containers.unclear(mine, [55, 77])


def test_a_proc_that_hides_processes_is_an_error_and_not_an_empty_container(m: Machine) -> None:
    """hidepid=2 leaves them out, process 1 among them."""
    shutil.rmtree(m.proc / "1")
    with pytest.raises(StepFailedError, match="hidepid"):
        m.containers.find(target())
    m.process(50, SCOPE)
    assert m.containers.find(target()) is not None


def test_a_process_that_may_not_be_read_is_an_error_and_not_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hidepid=1."""
    m = machine(tmp_path, 2)
    m.process(50, SCOPE)

    def refused(file: str | Path) -> str:
        raise PermissionError(1, "Operation not permitted")

    for module in (cgroups_module, processes_module, containers_module):
        monkeypatch.setattr(module, "read", refused)
    with pytest.raises(StepFailedError, match="hidepid"):
        m.containers.find(target())
    with pytest.raises(HiddenProcessesError, match="hidepid"):
        identify(50, m.proc)
    assert "Operation not permitted" in m.containers.unclear(target(), [50])


def test_a_machine_whose_containers_are_not_seen_says_so(m: Machine) -> None:
    m.process(40, "/system.slice/sshd.service")
    assert "set hostPID: true" in m.containers.blind()
    assert Containers(m.containers.cgroups, fake_kubelet=True).blind() == ""
    m.process(50, f"/k8s.io/{CONTAINER}")
    assert m.containers.blind() == ""


def test_a_seat_whose_container_never_started_has_no_process(tmp_path: Path) -> None:
    assert machine(tmp_path, 2).containers.find(target("")) is None


def test_b6_a_process_container_is_an_error_unless_the_fake_kubelet_reports_containers() -> None:
    """Who may patch a pod's status could have any process of the node killed."""
    with pytest.raises(StepFailedError, match=r"process://1' .* known are containerd://, cri-o://, docker://$"):
        Containers().find(target("process://1"))
    with pytest.raises(StepFailedError):
        Containers().processes(target("process://1"), identify(1))
    found = Containers(fake_kubelet=True).find(target(f"process://{os.getpid()}"))
    assert found.root == identify(os.getpid())


@pytest.mark.parametrize("container_id", ["process://x", "rkt://abc", "containerd://"])
def test_an_unknown_container_id_is_an_error_and_not_a_gone_container(container_id: str, tmp_path: Path) -> None:
    with pytest.raises(StepFailedError, match="containerd://"):
        machine(tmp_path, 2).containers.find(target(container_id))


def test_a_process_may_name_itself_by_any_bytes(tmp_path: Path) -> None:
    thread = tmp_path / "7" / "task" / "7"
    thread.mkdir(parents=True)
    (thread / "comm").write_bytes(b"\xff\n")
    (tmp_path / "7" / "stat").write_bytes(b"7 (\xff) S " + b"1 " * 18 + b"42 0\n")
    assert identify(7, tmp_path) == ProcessIdentity(pid=7, start=42)
    assert thread_names(7, tmp_path) == {"\ufffd"}


async def test_a_process_container_is_its_tree_and_its_group_and_no_reused_pid() -> None:
    script = "sleep 60 & (sleep 60 &) ; echo $$; wait"
    shell = await asyncio.create_subprocess_exec(
        "sh", "-c", script, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    root = identify(shell.pid)
    await shell.stdout.readline()
    containers, mine = Containers(fake_kubelet=True), target(f"process://{shell.pid}")
    try:
        found = containers.find(mine)
        assert found.cgroup is None, "its control group is also ours"
        assert len(containers.processes(mine, root)) >= 2
        everyone = containers.processes(mine, root, strays=True)
        assert len(everyone) == 3, "the orphan is in the group"
        orphan = next(one for one in everyone if one not in containers.processes(mine, root))
        assert containers.own(mine, [orphan.pid, 1]) == [orphan]
        assert containers.processes(mine, ProcessIdentity(pid=root.pid, start=root.start - 1), strays=True) == []
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        await shell.communicate()


async def test_a_container_is_frozen_and_thawed_by_its_control_group(m: Machine) -> None:
    m.process(50, SCOPE)
    containers = m.containers
    freezer = Freezer(containers.cgroups, 20.0)
    found = m.find()
    who = found.root
    assert freezer.means(found.cgroup) == f"cgroup v{m.version}"
    async with m.kernel(SCOPE):
        assert not freezer.stopped(who)
        await freezer.freeze(found.cgroup, lambda: [who])
        assert freezer.stopped(who), "no driver call may be made about it"
        await freezer.thaw(found.cgroup, list)
        assert not freezer.stopped(who)
        await freezer.freeze(found.cgroup, lambda: [who])
        freezer.release(found.cgroup, list)
    assert m.freezer(SCOPE).read_text().strip() in ("0", "THAWED")


def test_a_process_below_a_frozen_control_group_counts_as_stopped(m: Machine) -> None:
    m.process(50, f"{SCOPE}/nested")
    file = m.freezer(f"{SCOPE}/nested")
    freezer = Freezer(m.containers.cgroups, 1.0)
    who = ProcessIdentity(pid=50, start=100)
    assert not freezer.stopped(who)
    if m.version == 2:
        file.with_name("cgroup.events").write_text("populated 1\nfrozen 1\n")  # its parent's doing: cgroup.freeze is 0
    else:
        file.write_text("FREEZING\n")
    assert freezer.stopped(who)


async def test_a_freeze_without_effect_is_undone_and_reported(tmp_path: Path) -> None:
    m = machine(tmp_path, 2)
    m.process(50, SCOPE)
    found = m.find()
    freezer = Freezer(m.containers.cgroups, 0.05)
    with pytest.raises(StepFailedError, match="did not freeze"):
        await freezer.freeze(found.cgroup, lambda: [found.root])
    assert m.freezer(SCOPE).read_text() == "0"
    m.freezer(SCOPE).with_name("cgroup.events").write_text("frozen 1\n")
    with pytest.raises(StepFailedError, match="a control group above it"):
        await freezer.thaw(found.cgroup, list)


async def test_a_seat_without_a_control_group_is_stopped_by_signal() -> None:
    process = await asyncio.create_subprocess_exec("sleep", "60")
    who = identify(process.pid)
    try:
        freezer = Freezer(Containers().cgroups, 20.0)
        assert freezer.means(None) == SIGSTOP
        await freezer.freeze(None, lambda: [who])
        assert stopped(who)
        assert freezer.stopped(who)
        await freezer.thaw(None, lambda: [who])
        assert not stopped(who)
    finally:
        process.kill()
        await process.wait()


async def test_a_container_has_its_freezer_and_limit_also_from_within_a_control_group_namespace(m: Machine) -> None:
    """An unprivileged checkpointer reads paths that begin with ``/..`` and lack the levels in between."""
    m.process(50, SCOPE)
    m.memory(SCOPE, limit=60, used=20)
    lines = (m.proc / "50" / "cgroup").read_text()
    (m.proc / "50" / "cgroup").write_text(lines.replace(SCOPE, f"/../../{SCOPE.removeprefix('/kubepods.slice/')}"))
    containers = m.containers
    found = m.find()
    assert found.cgroup.freezer == m.freezer(SCOPE)
    assert [(room.where.endswith(SCOPE), room.free) for room in containers.cgroups.memory_rooms(found.cgroup)] == [
        (True, 40)
    ]
    freezer = Freezer(containers.cgroups, 20.0)
    assert freezer.means(found.cgroup) == f"cgroup v{m.version}"
    async with m.kernel(SCOPE):
        await freezer.freeze(found.cgroup, list)
        assert freezer.stopped(found.root), "no driver call may be made about it"


async def test_a_process_forked_between_the_list_and_the_stop_is_stopped_too() -> None:
    """The parent forks after it was listed and before it is stopped: only the listed processes are stopped."""
    processes = [await asyncio.create_subprocess_exec("sleep", "60") for _ in range(2)]
    parent, child = (who for process in processes if (who := identify(process.pid)) is not None)
    lists = iter([[parent], [parent]])

    def living() -> list[ProcessIdentity]:
        found = next(lists, None)
        while found and "sent" in asked and not stopped(parent):
            pass  # the list is outdated when it is used
        asked.append("sent")
        return found or [parent, child]

    asked: list[str] = []

    try:
        await Freezer(Containers().cgroups, 20.0).freeze(None, living)
        assert stopped(parent)
        assert stopped(child)
    finally:
        for process in processes:
            process.kill()
            await process.wait()


async def test_a_refused_sigcont_does_not_end_the_checkpointer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(process: ProcessIdentity, signum: signal.Signals) -> bool:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(freezer_module, "send", refused)
    Freezer(Containers().cgroups, 1.0).release(None, lambda: [ProcessIdentity(pid=1, start=1)])
