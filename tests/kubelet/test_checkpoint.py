import json
from pathlib import Path

import pytest

from kybernate.dev.fakes.kubelet import checkpoint
from kybernate.dev.fakes.kubelet.allocations import Allocation
from kybernate.dev.fakes.kubelet.checkpoint import CheckpointError
from kybernate.pb import deviceplugin_pb2 as pb
from tests.kubelet.stand import RESOURCE


def allocation(*devices: str, **nodes: tuple[int, ...]) -> Allocation:
    answer = pb.ContainerAllocateResponse(envs={"SEAT": devices[0]}, cdi_devices=[pb.CDIDevice(name="kyb.ai/g=0")])
    return Allocation("uid", "engine", RESOURCE, devices, answer, nodes=nodes)


def test_what_was_given_comes_back_with_the_cached_answer(tmp_path: Path) -> None:
    path = tmp_path / checkpoint.NAME
    given = [allocation("a", a=(0, 1)), allocation("b", b=())]
    checkpoint.write(path, given, {RESOURCE: {"b", "a"}, "kyb.ai/other": set()})
    found, registered = checkpoint.read(path)
    assert found == given
    assert registered == [RESOURCE, "kyb.ai/other"]
    entry = json.loads(path.read_text())["Data"]["PodDeviceEntries"][0]
    assert entry["DeviceIDs"] == {"0": ["a"], "1": ["a"]}
    assert set(entry) == {"PodUID", "ContainerName", "ResourceName", "DeviceIDs", "AllocResp"}


def test_no_file_is_an_empty_memory(tmp_path: Path) -> None:
    assert checkpoint.read(tmp_path / checkpoint.NAME) == ([], [])


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"Data": {}, "Checksum": 1}'])
def test_a_damaged_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / checkpoint.NAME
    path.write_text(text)
    with pytest.raises(CheckpointError, match="corrupted"):
        checkpoint.read(path)


def test_a_changed_file_does_not_match_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / checkpoint.NAME
    checkpoint.write(path, [allocation("a")], {})
    path.write_text(path.read_text().replace('"uid"', '"you"'))
    with pytest.raises(CheckpointError, match="corrupted"):
        checkpoint.read(path)
