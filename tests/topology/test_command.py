"""The output of ``kyb topology``: text and JSON."""

import json
from pathlib import Path

import pytest

from kybernate.dev.fakes.gpu.spec import hardware
from kybernate.dev.stack.stack_file import StackFile
from tests.command import Kyb
from tests.fakes.daemons import driver

PAIRS = """\
      GPU0  GPU1  GPU2  GPU3  NUMA Affinity
GPU0  X     NV12  SYS   SYS   0
GPU1  NV12  X     SYS   SYS   0
GPU2  SYS   SYS   X     NV12  1
GPU3  SYS   SYS   NV12  X     1

X    itself
SYS  over PCIe and the link between NUMA nodes
NV#  over # NVLinks, which work as one

GPU0  Fake A100 80GB PCIe  80.0 GiB  0000:11:00.0
GPU1  Fake A100 80GB PCIe  80.0 GiB  0000:21:00.0
GPU2  Fake A100 80GB PCIe  80.0 GiB  0000:31:00.0
GPU3  Fake A100 80GB PCIe  80.0 GiB  0000:41:00.0

"""
EVERY_SIZE = """\
Groups of every size, inside each other (no --config)
1x
  G0  GPU 0  a single GPU on NUMA node 0
  G1  GPU 1  a single GPU on NUMA node 0
  G2  GPU 2  a single GPU on NUMA node 1
  G3  GPU 3  a single GPU on NUMA node 1
2x
  G01  GPU 0,1  NVLink ×12 between 0 and 1; both share NUMA node 0
  G23  GPU 2,3  NVLink ×12 between 2 and 3; both share NUMA node 1
4x
  G0123  GPU 0,1,2,3  NVLink ×12 between 0 and 1 and NVLink ×12 between 2 and 3, else across NUMA nodes 0 and 1 (SYS)
"""
CONFIG = """\
profiles:
  - {name: gpu-2x-seat, resource: kyb.ai/gpu-2x-seat, groupSize: 2, seatsPerGroup: 3}
  - {name: gpu-4x-seat, resource: kyb.ai/gpu-4x-seat, groupSize: 4, seatsPerGroup: 2}
"""


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of this machine is seen."""
    for name in ("KYB_DRIVER", "KYB_FAKE_DRIVER", "KYB_CONFIG"):
        monkeypatch.delenv(name, raising=False)


async def test_a_preset_shows_matrix_groups_and_reasons(kyb: Kyb) -> None:
    assert await kyb("topology", "--preset", "4xA100-nvlink-pairs") == (0, PAIRS + EVERY_SIZE, "")


async def test_a_configuration_shows_its_groups_and_what_gets_none(kyb: Kyb, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    code, out, err = await kyb("topology", "--preset", "4xA100-nvlink-pairs", "--config", str(path))
    assert (code, err) == (0, "")
    assert out.removeprefix(PAIRS).splitlines() == [
        f"Groups by {path}",
        "gpu-2x-seat (kyb.ai/gpu-2x-seat, 3 seats each)",
        "  G01  GPU 0,1  NVLink ×12 between 0 and 1; both share NUMA node 0",
        "  G23  GPU 2,3  NVLink ×12 between 2 and 3; both share NUMA node 1",
        "warning: profile gpu-4x-seat (kyb.ai/gpu-4x-seat) has no seats here: every group of 4 GPUs would overlap "
        "another group; list groups of this size, or write overlap: timeshare, to change that",
    ]


async def test_programs_get_everything(kyb: Kyb) -> None:
    code, out, _ = await kyb("topology", "--preset", "2xA100-half-mig", "-o", "json")
    body = json.loads(out)
    assert code == 0
    assert body["config"] is None
    assert [gpu["mig_enabled"] for gpu in body["gpus"]] == [False, True]
    assert body["instances"][0]["mig"]["profile"] == "3g.40gb"
    assert body["matrix"][1] == ["GPU0", "X", "SYS", "0"]
    assert body["links"][0]["level"] == "SYS"
    assert {group["name"]: group["gpus"] for group in body["groups"]} == {
        "G0": [0],
        "G1-2g.20gb-2": [1],
        "G1-2g.20gb-3": [1],
        "G1-3g.40gb-1": [1],
    }
    assert body["groups"][0]["why"] == "a single GPU on NUMA node 0"
    assert body["warnings"] == []


async def test_a_running_drivers_gpus_are_read_as_the_services_read_them(
    kyb: Kyb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket, config = tmp_path / "driver", tmp_path / "configs"
    config.mkdir()
    (config / "default.yaml").write_text(CONFIG)
    (config / "other.yaml").write_text("profiles: []\n")
    monkeypatch.setenv("KYB_DRIVER", "fake")
    monkeypatch.setenv("KYB_FAKE_DRIVER", str(socket))
    monkeypatch.setenv("KYB_CONFIG", str(config))
    async with driver(socket, "--preset", "4xA100-nvlink-pairs"):
        code, out, err = await kyb("topology")
        assert (code, err) == (0, "")
        assert out.startswith(PAIRS + f"Groups by {config}\n  this node names no configuration, so it gets default;")
        code, out, _ = await kyb("topology", "-o", "json")
        assert json.loads(out)["gpus"][0]["uuid"] == hardware("4xA100-nvlink-pairs").gpus[0].uuid


async def test_the_stack_that_runs_here_shows_its_groups(kyb: Kyb, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    socket = tmp_path / "driver"
    file = StackFile()
    assert file.claim()
    try:
        file.write({"driver_socket": str(socket), "folder": str(tmp_path)})
        async with driver(socket, "--preset", "4xA100-nvlink-pairs"):
            code, out, _ = await kyb("topology", "--stack")
    finally:
        file.release()
    assert code == 0
    assert out.startswith(PAIRS)
    assert "gpu-2x-seat (kyb.ai/gpu-2x-seat, 3 seats each)" in out


async def test_config_check_shows_every_configuration_of_a_folder(kyb: Kyb, tmp_path: Path) -> None:
    one = "{profiles: [{name: %s, resource: kyb.ai/%s, groupSize: %d, seatsPerGroup: 2}]}"
    path = tmp_path / "configs"
    path.mkdir()
    (path / "default.yaml").write_text(one % ("a", "a", 1))
    (path / "big.yaml").write_text(one % ("b", "b", 2))
    code, out, err = await kyb("config", "check", str(path), "--gpus", "2")
    assert (code, err) == (0, "")
    assert [line for line in out.splitlines() if not line.startswith(" ")] == [
        f"{path} (big): good: b",
        f"{path} (default): good: a",
    ]
    _, out, _ = await kyb("config", "check", str(path), "--gpus", "2", "-o", "json")
    body, _ = (json.loads(line) for line in out.splitlines())
    assert (body["name"], body["groups"][0]["why"]) == ("big", "same PCIe switch (PIX); both share NUMA node 0")


@pytest.mark.parametrize(
    ("arguments", "env", "code", "text"),
    [
        (("--preset", "4xB100"), {}, 2, "kyb: --preset: no preset '4xB100'; presets are "),
        (("--preset", "8xL40S", "--stack"), {}, 2, "kyb: --preset and --stack name two machines; leave one out"),
        (("--stack",), {}, 1, "kyb: no stack runs here; start one with kyb up, or name a --preset"),
        ((), {"KYB_DRIVER": "real"}, 2, "kyb: KYB_DRIVER='real': is not known; write 'cuda' or 'fake'"),
        ((), {"KYB_DRIVER": "fake"}, 1, "kyb: fake GPUs need the socket of the fake driver; set KYB_FAKE_DRIVER"),
        (("--preset", "8xL40S", "--config", "nowhere.yaml"), {}, 2, "kyb: nowhere.yaml: no such file; check the path"),
    ],
)
async def test_wrong_use_says_what_to_do(
    kyb: Kyb, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], env: dict[str, str], code: int, text: str
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    ended, out, err = await kyb("topology", *arguments)
    assert (ended, out) == (code, "")
    assert err.startswith(text)
