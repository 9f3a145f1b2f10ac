"""What the doctor reads of /proc, /sys and /dev, from trees laid out as kernels do."""

import os
import tempfile
from pathlib import Path

from kybernate.cgroups import Cgroups
from kybernate.doctor.host import find_freezer, read_host, read_nodes, read_target
from kybernate.doctor.model import TargetFacts

STATUS = "Name:\t{name}\nUid:\t1000\t{uid}\t1000\t1000\nCapEff:\t0000000000080000\n"


def tree(root: Path, **files: str) -> Path:
    """Lay out files."""
    for path, text in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def v2(root: Path) -> Path:
    return tree(
        root,
        **{
            "proc/41/status": STATUS.format(name="vllm", uid=0),
            "proc/41/cgroup": "0::/kubepods.slice/pod1.slice/c1\n",
            "proc/self/cgroup": "0::/me\n",
            "sys/fs/cgroup/cgroup.controllers": "memory",
            "sys/fs/cgroup/kubepods.slice/memory.max": "max",
            "sys/fs/cgroup/kubepods.slice/memory.current": "7000",
            "sys/fs/cgroup/kubepods.slice/cgroup.freeze": "0",
            "sys/fs/cgroup/kubepods.slice/pod1.slice/memory.max": "1000",
            "sys/fs/cgroup/kubepods.slice/pod1.slice/memory.current": "900",
            "sys/fs/cgroup/kubepods.slice/pod1.slice/memory.stat": "anon 500\nactive_file 100\ninactive_file 250\n"
            "file_dirty 30\nfile_writeback 20\n",
            "sys/fs/cgroup/kubepods.slice/pod1.slice/c1/memory.max": "2000",
            "sys/fs/cgroup/kubepods.slice/pod1.slice/c1/memory.current": "900",
            "sys/fs/cgroup/kubepods.slice/pod1.slice/c1/cgroup.freeze": "0",
        },
    )


def v1(root: Path) -> Path:
    return tree(
        root,
        **{
            "proc/41/status": STATUS.format(name="vllm", uid=0),
            "proc/41/cgroup": "9:memory:/kubepods/pod1/c1\n6:freezer:/kubepods/pod1/c1\n1:cpu,cpuacct:/x\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str((1 << 63) - 4096),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1",
            "sys/fs/cgroup/memory/kubepods/pod1/c1/memory.limit_in_bytes": "1000",
            "sys/fs/cgroup/memory/kubepods/pod1/c1/memory.usage_in_bytes": "900",
            "sys/fs/cgroup/memory/kubepods/pod1/c1/memory.stat": "total_active_file 200\ntotal_inactive_file 150\n"
            "total_dirty 50\ntotal_writeback 0\n",
            "sys/fs/cgroup/freezer/kubepods/pod1/c1/freezer.state": "THAWED",
        },
    )


def cgroups(root: Path) -> Cgroups:
    return Cgroups(root / "sys/fs/cgroup", root / "proc")


def target(root: Path, pid: int) -> TargetFacts:
    """A process as the doctor sees it."""
    tree(root, **{f"proc/{pid}/status": STATUS.format(name="vllm", uid=0)})
    found = read_target(root, cgroups(root), pid)
    assert found is not None
    return found


def limit(root: Path, pid: int) -> tuple[str, int | None, int | None]:
    """(folder of its memory's control group below /sys/fs/cgroup, limit, free bytes)."""
    found = target(root, pid)
    return found.cgroup.removeprefix(str(root / "sys/fs/cgroup")), found.limit_bytes, found.free_bytes


def test_the_tightest_limit_above_counts_and_clean_cache_is_free(tmp_path: Path) -> None:
    path = "/kubepods.slice/pod1.slice/c1"
    assert limit(v2(tmp_path), 41) == (path, 1000, 1000 - (900 - 300))


def test_version_1_is_read_as_well_and_its_largest_number_is_no_limit(tmp_path: Path) -> None:
    assert limit(v1(tmp_path), 41) == ("/memory/kubepods/pod1/c1", 1000, 1000 - (900 - 300))
    tree(tmp_path, **{"proc/42/cgroup": "9:memory:/\n"})
    assert limit(tmp_path, 42) == ("/memory", None, None)


def test_memory_high_is_a_limit_for_the_doctor_as_it_is_for_the_checkpointer(tmp_path: Path) -> None:
    pod = "sys/fs/cgroup/kubepods.slice/pod1.slice"
    tree(v2(tmp_path), **{f"{pod}/memory.max": "max", f"{pod}/c1/memory.max": "max", f"{pod}/c1/memory.high": "950"})
    assert limit(tmp_path, 41) == ("/kubepods.slice/pod1.slice/c1", 950, 50)
    cgroup = cgroups(tmp_path).of_process(41)
    assert cgroup is not None
    assert [(room.limit, room.free) for room in cgroups(tmp_path).memory_rooms(cgroup)] == [(950, 50)]


def test_what_is_outside_of_this_cgroup_namespace_is_unknown(tmp_path: Path) -> None:
    tree(v2(tmp_path), **{"proc/42/cgroup": "0::/../../other\n"})
    assert limit(tmp_path, 42) == ("", None, None)
    assert limit(tmp_path, 43) == ("", None, None)


def test_the_root_of_a_cgroup_namespace_has_limits_too(tmp_path: Path) -> None:
    tree(tmp_path, **{"proc/42/cgroup": "0::/\n", "sys/fs/cgroup/cgroup.controllers": "memory"})
    tree(tmp_path, **{"sys/fs/cgroup/memory.max": "1000", "sys/fs/cgroup/memory.current": "900"})
    assert limit(tmp_path, 42) == ("", 1000, 100)


def test_versions_of_control_groups(tmp_path: Path) -> None:
    assert cgroups(tmp_path / "nothing").version == "none"
    assert cgroups(v2(tmp_path / "v2")).version == "v2"
    assert cgroups(v1(tmp_path / "v1")).version == "v1"
    hybrid = tree(v1(tmp_path / "h"), **{"sys/fs/cgroup/unified/cgroup.controllers": ""})
    assert cgroups(hybrid).version == "hybrid"


def test_the_freezer_is_that_of_a_gpu_process_else_of_the_pods(tmp_path: Path) -> None:
    root = v2(tmp_path / "v2")
    assert find_freezer(cgroups(root), [41]) == root / "sys/fs/cgroup/kubepods.slice/pod1.slice/c1/cgroup.freeze"
    assert find_freezer(cgroups(root), []) == root / "sys/fs/cgroup/kubepods.slice/cgroup.freeze"
    other = v1(tmp_path / "v1")
    assert find_freezer(cgroups(other), [41]) == other / "sys/fs/cgroup/freezer/kubepods/pod1/c1/freezer.state"
    assert find_freezer(cgroups(other), []) is None


def test_device_nodes_and_whether_they_open(tmp_path: Path) -> None:
    tree(tmp_path, **{"dev/nvidia0": "", "dev/nvidiactl": "", "dev/nvidia-caps/x": "", "dev/null": ""})
    assert read_nodes(tmp_path) == {"/dev/nvidia0": "", "/dev/nvidiactl": ""}


def test_a_node_without_permission_is_named() -> None:
    was = os.geteuid()
    with tempfile.TemporaryDirectory() as folder:
        root = tree(Path(folder), **{"dev/nvidia0": ""})
        (root / "dev/nvidia0").chmod(0)
        root.chmod(0o755)
        try:
            if was == 0:
                os.setresuid(65534, 65534, 0)  # root may open everything
            assert read_nodes(root) == {"/dev/nvidia0": "no permission"}
        finally:
            os.setresuid(was, was, was)


def test_a_whole_machine(tmp_path: Path) -> None:
    root = tree(
        v2(tmp_path),
        **{
            "proc/self/status": STATUS.format(name="kyb", uid=1001),
            "proc/sys/kernel/yama/ptrace_scope": "1\n",
            "proc/version": "Linux version 6.1",
            "proc/meminfo": "MemTotal: 10 kB\nMemAvailable:       4 kB\n",
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
            "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.71.05",
        },
    )
    (root / "proc/self/ns").mkdir()
    (root / "proc/self/ns/pid").symlink_to("pid:[4026531836]")
    host = read_host([41, 42], root)
    assert (host.uid, host.capabilities, host.ptrace_scope) == (1001, 1 << 19, 1)
    assert (host.host_pids, host.gvisor, host.open_module) == (True, False, True)
    assert (host.available_bytes, host.cgroup, host.freezer_writable) == (4096, "v2", True)
    assert host.huge_pages == "madvise"
    assert [(target.pid, target.name, target.uid) for target in host.targets] == [(41, "vllm", 0)]
    assert host.targets[0].limit_bytes == 1000


def test_a_container_has_another_pid_namespace_and_gvisor_has_none_that_tells(tmp_path: Path) -> None:
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").symlink_to("pid:[4026532500]")
    assert read_host([], tmp_path).host_pids is False
    tree(tmp_path, **{"proc/version": "Linux version 4.4.0 (gVisor)"})
    assert read_host([], tmp_path).host_pids is None


def test_this_machine_can_be_read() -> None:
    host = read_host([os.getpid()])
    assert host.available_bytes is not None
    assert [target.pid for target in host.targets] == [os.getpid()]
