"""CDI names and the spec file: their content, and when they are used."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kybernate.machine import Gpu, Mig
from services.plugin import cdi
from services.plugin.core.devices import device_paths
from services.plugin.gpu_watch import mig_nodes
from services.plugin.offers import cdi_names
from tests.plugin import stand
from tests.plugin.stand import GPUS, ONE, TWO, paths

PRESENT = frozenset(device_paths(GPUS))
NVIDIA = """
cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
  - name: "0"
    containerEdits: {deviceNodes: [{path: /dev/nvidia0}]}
  - name: GPU-0
    containerEdits: {deviceNodes: [{path: /dev/nvidia0}]}
containerEdits:
  env: [NVIDIA_VISIBLE_DEVICES=void]
"""


def everything() -> frozenset[str]:
    return frozenset(gpu.uuid for gpu in GPUS)


def test_the_spec_has_what_the_specification_requires() -> None:
    node = stand.offer(present=PRESENT)
    document = cdi.spec(node.cdi_devices())
    assert set(document) == {"cdiVersion", "kind", "devices"}
    assert (document["cdiVersion"], document["kind"]) == ("0.5.0", "kyb.ai/group")
    assert [device["name"] for device in document["devices"]] == [
        f"{len(group.gpus)}x-{group.key}" for group in node.groups
    ]
    nodes = document["devices"][2]["containerEdits"]["deviceNodes"]
    paths = ["/dev/nvidia4", "/dev/nvidia5", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]
    assert nodes == [{"path": path, "hostPath": path, "permissions": "rw"} for path in paths]


def test_the_spec_is_replaced_as_a_whole_only_when_it_changed_and_never_empty(tmp_path: Path) -> None:
    node = stand.offer(present=PRESENT)
    folder = tmp_path / "cdi"
    assert cdi.write(folder, node.cdi_devices())
    assert not cdi.write(folder, node.cdi_devices())
    assert [path.name for path in folder.iterdir()] == ["kyb.ai-group.json"]
    assert json.loads((folder / cdi.FILE).read_text()) == cdi.spec(node.cdi_devices())
    assert (folder / cdi.FILE).stat().st_mode & 0o777 == 0o644
    assert cdi.write(folder, {})
    assert list(folder.iterdir()) == []
    cdi.remove(folder)  # there is none: nothing happens
    assert stand.offer().cdi_devices() == {}


def test_nvidias_own_devices_are_found_among_other_specs(tmp_path: Path) -> None:
    (tmp_path / "nvidia.yaml").write_text(NVIDIA)
    (tmp_path / "other.json").write_text(json.dumps({"kind": "kyb.ai/group", "devices": [{"name": "GPU-9"}]}))
    (tmp_path / "operator.json").write_text('{"kind": "nvidia.com/gpu", "devices": [{"name": "GPU-1"}]}')
    (tmp_path / "broken.yaml").write_text("kind: nvidia.com/gpu\n  : [")
    (tmp_path / "note.txt").write_text("kind: nvidia.com/gpu")
    assert cdi.nvidia_devices([tmp_path, tmp_path / "nothing"]) == {"0", "GPU-0", "GPU-1"}


def test_auto_takes_cdi_only_where_nvidias_specs_have_every_gpu() -> None:
    groups = stand.offer().groups
    assert cdi_names("auto", groups, frozenset({"GPU-0"})) is None
    assert cdi_names("auto", groups, frozenset()) is None
    assert cdi_names("auto", (), everything()) is None
    assert cdi_names("envvar", groups, everything()) is None
    own = f"kyb.ai/group=2x-{groups[2].key}"
    pair = (own, "nvidia.com/gpu=GPU-2", "nvidia.com/gpu=GPU-3")
    assert (cdi_names("auto", groups, everything()) or {})["G23"] == pair
    assert (cdi_names("cdi-cri", groups, frozenset()) or {})["G23"] == (own,)


@pytest.mark.parametrize("libraries", [True, False])
def test_the_answer_has_cdi_devices_instead_of_device_nodes(libraries: bool) -> None:
    groups = stand.offer().groups
    names = cdi_names("cdi-cri", groups, everything() if libraries else frozenset())
    node = stand.offer(present=PRESENT, cdi=names)
    seat = next(seat for seat, group in node.seats.items() if group.profile.resource == TWO)
    answer = node.answer(TWO, [seat])
    assert paths(answer) == set()
    assert answer.cdi_devices[0].name == f"kyb.ai/group=2x-{groups[2].key}"
    assert len(answer.cdi_devices) == (3 if libraries else 1)
    # NVIDIA's devices bring everything; its runtime must not add to them, and images say "all".
    assert answer.envs["NVIDIA_VISIBLE_DEVICES"] == ("void" if libraries else "GPU-2,GPU-3")
    assert answer.envs["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_with_the_fakes_there_is_no_cdi() -> None:
    names = cdi_names("cdi-cri", stand.offer().groups, frozenset())
    node = stand.offer(present=PRESENT, cdi=names, fake_driver=Path("/tmp/driver.sock"))
    seat = next(seat for seat, group in node.seats.items() if group.profile.resource == ONE)
    assert not node.answer(ONE, [seat]).cdi_devices


def test_a_mig_instance_has_its_own_device_nodes() -> None:
    instance = Gpu(0, "MIG-1", 7, "0000:01:00.0", "fake", 1, 0, Mig("GPU-0", "3g.40gb", 2, 0))
    minors = (
        "config 1\nmonitor 2\ngpu7/gi2/access 21\ngpu7/gi2/ci0/access 22\ngpu7/gi2/ci1/access 23\ngpu0/gi2/access 3"
    )
    nodes = ("/dev/nvidia-caps/nvidia-cap21", "/dev/nvidia-caps/nvidia-cap22")
    assert mig_nodes((instance,), minors) == {"MIG-1": nodes}
    assert mig_nodes((instance,), "") == {"MIG-1": ()}
    assert set(nodes) <= set(device_paths(GPUS, {"MIG-1": nodes}))


def test_a_name_never_refers_to_other_gpus() -> None:
    """A restarted container gets the names of its first start from kubelet, also after a change of configuration."""
    before = stand.offer(present=PRESENT).groups
    other = replace(before[0], name="G23")
    names = cdi_names("cdi-cri", before, frozenset()) or {}
    assert names["G23"] != (cdi_names("cdi-cri", (other,), frozenset()) or {})["G23"]
    again = (replace(before[2], name="other", profile=before[2].profile.model_copy(update={"resource": "a/b"})),)
    assert (cdi_names("cdi-cri", again, frozenset()) or {})["other"] == names["G23"]
    both = stand.offer(groups=(*before, *again), present=PRESENT).cdi_devices()
    assert len(both) == 3
