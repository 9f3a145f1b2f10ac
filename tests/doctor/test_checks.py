"""What the doctor makes of what it read: every line that it can say."""

from dataclasses import replace
from typing import Any

import pytest

from kybernate.doctor import Finding, Severity
from kybernate.doctor.driver_checks import check_backends, check_driver
from kybernate.doctor.host_checks import check_host
from kybernate.doctor.model import DriverFacts, HostFacts, TargetFacts
from kybernate.machine import Gpu, GpuProcess

GIB = 2**30
GPUS = tuple(
    Gpu(index, f"GPU-{index}", index, f"0000:{index}b:00.0", "H100", memory_bytes=80 * GIB, numa_node=0)
    for index in range(2)
)
DRIVER = DriverFacts(
    binding="ctypes on libcuda.so.1",
    cuda_version=13000,
    init_code=0,
    init_seconds=2.7,
    release="580.95.05",
    gpu_count=2,
    gpus=GPUS,
    persistence={"GPU-0": True, "GPU-1": True},
    uses=(GpuProcess(41, "GPU-0", 40 * GIB),),
    answers={41: 0},
)
TARGET = TargetFacts(41, "vllm", 0, "/kubepods/pod1/c1", limit_bytes=64 * GIB, free_bytes=50 * GIB)
HOST = HostFacts(
    capabilities=1 << 19,
    ptrace_scope=1,
    host_pids=True,
    machine="x86_64",
    cgroup="v2",
    freezer="/sys/fs/cgroup/kubepods/cgroup.freeze",
    freezer_writable=True,
    nodes=dict.fromkeys(("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidia1"), ""),
    available_bytes=200 * GIB,
    huge_pages="always",
    targets=(TARGET,),
)


def findings(driver: DriverFacts = DRIVER, host: HostFacts = HOST) -> list[Finding]:
    return [*check_driver(driver, host), *check_host(driver, host)]


def the(check: str, driver: DriverFacts = DRIVER, host: HostFacts = HOST) -> Finding:
    found = [finding for finding in findings(driver, host) if finding.check == check]
    assert len(found) == 1, found
    return found[0]


def test_on_a_good_node_every_line_is_ok_and_nothing_is_to_be_done() -> None:
    assert {finding.level for finding in findings()} == {Severity.OK}
    assert {finding.remedy for finding in findings()} == {""}
    names = [finding.check for finding in findings()]
    assert names[:6] == ["libcuda", "version", "nvml", "mig", "persistence", "access"]
    assert names[6:] == ["machine", "nodes", "ptrace", "pids", "cgroup", "memory", "host memory", "huge pages", "criu"]


def test_whatever_is_not_ok_says_what_to_do() -> None:
    bad = HostFacts(machine="aarch64", ptrace_scope=3, targets=(replace(TARGET, uid=7, free_bytes=0),))
    broken = replace(DRIVER, init_code=802, gpu_count=3, uses=(*DRIVER.uses, GpuProcess(99, "GPU-1", 1, exact=False)))
    found = [*findings(broken, bad), *findings(DriverFacts(trouble="none; try", nvml_trouble="none; try"), bad)]
    assert [finding for finding in found if finding.level is not Severity.OK and not finding.remedy] == []


@pytest.mark.parametrize(
    ("cuda", "release", "level", "says"),
    [
        (12040, "550.163.01", Severity.FAIL, "driver 550 has no checkpoint API; needs 570 or newer (580 recommended)"),
        (12080, "570.195.03", Severity.WARN, "can: park and activate; not: activate on other GPUs (580), several"),
        (
            13000,
            "580.95.05",
            Severity.OK,
            "activate on other GPUs; not: several processes as one launch-job (590), custom",
        ),
        (13010, "590.44.01", Severity.OK, "several processes as one launch-job; not: custom storage (CUDA 13.4)"),
        (13020, "595.71.05", Severity.WARN, "595 breaks NCCL and UVM processes at a park"),
        (13040, "612.10.01", Severity.OK, "custom storage"),
    ],
)
def test_the_version_says_what_works(cuda: int, release: str, level: Severity, says: str) -> None:
    finding = the("version", replace(DRIVER, cuda_version=cuda, release=release))
    assert finding.level is level
    assert says in finding.finding


def test_the_open_module_of_595_is_the_one_that_hangs_hosts() -> None:
    driver = replace(DRIVER, cuda_version=13020, release="595.71.05")
    assert "hung hosts" in the("version", driver, replace(HOST, open_module=True)).finding
    assert "hung hosts" not in the("version", driver, replace(HOST, open_module=False)).finding


def test_a_missing_driver_is_the_first_finding() -> None:
    driver = DriverFacts(trouble="no library; install it", nvml_trouble="no NVML; install it")
    first, second, *_ = findings(driver, HostFacts(machine="x86_64"))
    assert (first.check, first.level) == ("libcuda", Severity.FAIL)
    assert first.finding == "no NVIDIA driver on this machine: no library"
    assert "kyb up" in first.remedy
    assert (second.check, second.level, second.remedy) == ("nvml", Severity.FAIL, "install it")
    assert the("nodes", driver, HostFacts()).finding == "no /dev/nvidia*"


def test_cuinit_is_named_with_its_number() -> None:
    finding = the("libcuda", replace(DRIVER, init_code=802, answers={}))
    assert finding.finding == "cuInit answers SYSTEM_NOT_READY (802)"
    assert "fabric manager" in finding.remedy


def test_a_step_that_hung_is_a_failure_and_what_was_read_before_counts() -> None:
    driver = replace(DRIVER, hung="cuInit did not end within 60 s", init_code=None, answers={})
    assert the("driver", driver).finding.startswith("cuInit did not end within 60 s")
    assert the("nvml", driver).level is Severity.OK


def test_each_gpu_in_mig_mode_has_its_line() -> None:
    driver = replace(DRIVER, gpus=(GPUS[0], replace(GPUS[1], mig_enabled=True)))
    finding = the("mig", driver)
    assert (finding.level, finding.finding[:20]) == (Severity.WARN, "GPU 1 is in MIG mode")
    assert "nvidia-smi -i 1 -mig 0" in finding.remedy


def test_persistence_off_is_a_warning_since_the_checkpointer_stands_in() -> None:
    driver = replace(DRIVER, persistence={"GPU-0": True, "GPU-1": False})
    assert the("persistence", driver).level is Severity.WARN
    assert "off on GPU 1" in the("persistence", driver).finding


def test_a_process_out_of_reach_is_a_failure() -> None:
    finding = the("access", replace(DRIVER, answers={41: 304, 42: 0}))
    assert finding.level is Severity.FAIL
    assert "41" in finding.finding
    assert "42" not in finding.finding


@pytest.mark.parametrize(
    ("host", "level", "says"),
    [
        (replace(HOST, capabilities=0), Severity.WARN, "only processes of user 0, and kernel.yama.ptrace_scope is 1"),
        (replace(HOST, capabilities=0, uid=1000), Severity.FAIL, "user 1000: processes of user 0 are out of reach"),
        (replace(HOST, ptrace_scope=3), Severity.WARN, "no process may attach"),
    ],
)
def test_rights_over_other_processes(host: HostFacts, level: Severity, says: str) -> None:
    assert the("ptrace", host=host).level is level
    assert says in the("ptrace", host=host).finding


def test_pids_that_only_the_driver_knows_mean_another_pid_namespace() -> None:
    finding = the("pids", host=replace(HOST, targets=()))
    assert (finding.level, finding.remedy) == (Severity.FAIL, "hostPID: true")
    assert the("pids", host=replace(HOST, host_pids=False)).level is Severity.WARN
    assert the("pids", host=replace(HOST, host_pids=None)).level is Severity.WARN


def test_without_a_writable_freezer_sigstop_is_used() -> None:
    for host in (replace(HOST, freezer="", freezer_writable=False), replace(HOST, freezer_writable=False)):
        assert the("cgroup", host=host).level is Severity.WARN
        assert "SIGSTOP" in the("cgroup", host=host).finding


def test_missing_and_closed_device_nodes_are_named() -> None:
    nodes = {**HOST.nodes, "/dev/nvidia0": "no permission"}
    del nodes["/dev/nvidia1"]
    finding = the("nodes", host=replace(HOST, nodes=nodes))
    assert finding.finding == "/dev/nvidia1 is missing; /dev/nvidia0: no permission"
    assert [one.check for one in findings(replace(DRIVER, fake=True)) if one.check == "nodes"] == []


def test_a_container_limit_must_hold_the_vram_once_more_and_a_tenth() -> None:
    assert the("memory").finding == "vllm (41): 40.0 GiB of VRAM need 44.0 GiB; its limit of 64.0 GiB leaves 50.0 GiB"
    finding = the("memory", host=replace(HOST, targets=(replace(TARGET, free_bytes=20 * GIB),)))
    assert finding.level is Severity.FAIL
    assert finding.remedy == "raise the container's memory limit to at least 88.0 GiB"
    unlimited = replace(TARGET, limit_bytes=None, free_bytes=None)
    assert the("memory", host=replace(HOST, targets=(unlimited,))).level is Severity.OK
    assert the("memory", host=replace(HOST, targets=(replace(unlimited, cgroup=""),))).level is Severity.WARN


def test_processes_of_one_container_share_its_limit() -> None:
    driver = replace(DRIVER, uses=(*DRIVER.uses, GpuProcess(42, "GPU-1", 20 * GIB)))
    finding = the("memory", driver, replace(HOST, targets=(TARGET, replace(TARGET, pid=42))))
    assert (finding.level, finding.finding[:35]) == (Severity.FAIL, "vllm (41), vllm (42): 60.0 GiB of V")


def test_memory_that_the_driver_does_not_tell_is_a_warning() -> None:
    driver = replace(DRIVER, uses=(GpuProcess(41, "GPU-0", 40 * GIB, exact=False),))
    found = [finding for finding in findings(driver) if finding.check == "memory"]
    assert [finding.level for finding in found] == [Severity.OK, Severity.WARN]


@pytest.mark.parametrize("setting", ["madvise", "never"])
def test_without_huge_pages_parks_are_slow(setting: str) -> None:
    found = the("huge pages", host=replace(HOST, huge_pages=setting))
    assert (found.level, found.remedy) == (
        Severity.WARN,
        "echo always > /sys/kernel/mm/transparent_hugepage/enabled",
    )
    assert the("huge pages", host=replace(HOST, huge_pages="")).level is Severity.OK, "a kernel without them"


def test_the_host_should_hold_all_vram_once() -> None:
    finding = the("host memory", host=replace(HOST, available_bytes=100 * GIB))
    assert finding.level is Severity.WARN
    assert finding.finding == "100.0 GiB available; 160.0 GiB of VRAM parked once need 176.0 GiB"


def test_other_machines_and_gvisor_are_a_warning() -> None:
    assert the("machine", host=replace(HOST, machine="aarch64")).level is Severity.WARN
    assert the("machine", host=replace(HOST, gvisor=True)).level is Severity.WARN


def backends(driver: DriverFacts = DRIVER, host: HostFacts = HOST) -> dict[str, Finding]:
    return {one.check: one for one in check_backends(driver, findings(driver, host))}


def test_on_a_good_node_every_backend_works() -> None:
    assert {name: one.level for name, one in backends().items()} == dict.fromkeys(
        ("cuda", "engines", "restart"), Severity.OK
    )


@pytest.mark.parametrize(
    ("driver", "host", "says", "engines"),
    [
        ({"cuda_version": 12040, "release": "550.163.01"}, {}, "has no checkpoint API", Severity.OK),
        ({}, {"machine": "aarch64"}, "machine: ", Severity.OK),
        ({"nvml_trouble": "no NVML; install it", "gpus": ()}, {}, "nvml: ", Severity.WARN),
        ({"gpus": (replace(DRIVER.gpus[0], mig_enabled=True), DRIVER.gpus[1])}, {}, "none on GPU 0 (MIG)", Severity.OK),
    ],
    ids=["old driver", "arm64", "no NVML", "MIG"],
)
def test_a_backend_that_cannot_park_here_says_why_and_which_one_can(
    driver: dict[str, Any], host: dict[str, Any], says: str, engines: Severity
) -> None:
    found = backends(replace(DRIVER, **driver), replace(HOST, **host))
    assert found["cuda"].level is Severity.WARN
    assert says in found["cuda"].finding
    assert "restart" in found["cuda"].remedy
    assert {found["engines"].level, found["restart"].level} == {engines}
