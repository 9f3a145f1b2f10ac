"""What plugin and manager know of the machine's GPUs, so that both form the same groups while one is away."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kybernate.machine import PcieLevel
from kybernate.node import known_gpus
from kybernate.node.known_gpus import FILE, KnownGpus, learn, load, merge
from tests.topology.machines import gpu, link, part

FOUR = tuple(gpu(number) for number in range(4))
LINKS = (link(FOUR[0], FOUR[1], PcieLevel.PIX), link(FOUR[2], FOUR[3], PcieLevel.PIX))


def test_a_gpu_that_is_away_stays_known_with_its_index_and_links() -> None:
    known = merge(KnownGpus(), FOUR, LINKS)
    # NVML, opened anew, counts without it.
    fewer = [replace(one, index=number) for number, one in enumerate(FOUR[1:])]
    again = merge(known, fewer, LINKS[1:])
    assert again == known == merge(again, FOUR, LINKS)


def test_renumbered_gpus_have_their_new_numbers_once_all_are_there() -> None:
    known = merge(KnownGpus(), FOUR)
    turned = [replace(one, index=3 - one.index) for one in FOUR]
    assert [one.uuid for one in merge(known, turned).gpus] == [one.uuid for one in reversed(FOUR)]


def test_a_new_gpu_whose_number_is_taken_gets_another_one() -> None:
    known = merge(KnownGpus(), [replace(one, index=number) for number, one in enumerate(FOUR[1:])])
    found = merge(known, [FOUR[0], *FOUR[2:]])  # 1 went while 0 came
    assert [(one.index, one.uuid) for one in found.gpus] == [
        (0, FOUR[1].uuid),
        (1, FOUR[2].uuid),
        (2, FOUR[3].uuid),
        (3, FOUR[0].uuid),
    ]


def test_another_gpu_in_the_same_place_replaces_the_one_before() -> None:
    new = replace(FOUR[3], uuid="GPU-new")
    found = merge(merge(KnownGpus(), FOUR, LINKS), [*FOUR[:3], new])
    assert found.gpus == (*FOUR[:3], new)
    assert found.before == (FOUR[3],)
    assert found.links == LINKS[:1]


def test_instances_follow_their_gpu() -> None:
    cut = gpu(0, mig_enabled=True)
    parts = [part(cut, number, "1g.10gb") for number in (1, 2)]
    known = merge(KnownGpus(), [cut, FOUR[1]], (), parts)
    assert merge(known, [FOUR[1]]).instances == tuple(parts)  # the GPU is away
    made_anew = merge(known, [cut, FOUR[1]], (), parts[:1])
    assert (made_anew.instances, made_anew.before) == (tuple(parts[:1]), (parts[1],))


def test_both_services_read_what_either_saw_and_another_boot_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = replace(FOUR[0], mig_enabled=True)
    whole = learn(tmp_path / "new", (cut, *FOUR[1:]), LINKS, [part(cut, 1, "1g.10gb")])
    assert learn(tmp_path / "new", FOUR[2:], LINKS[1:], ()) == whole == load(tmp_path / "new")
    monkeypatch.setattr(known_gpus, "boot_id", lambda: "another")
    after = learn(tmp_path / "new", FOUR[1:], LINKS[1:], ())
    assert after.gpus == FOUR[1:]
    assert {one.uuid for one in after.before} == {cut.uuid, "MIG-0-1"}


@pytest.mark.parametrize("text", ["", '{"gpus": [{"uuid": 3}]}', "[]", '{"gpus": [', "\x00\xff"])
def test_a_torn_or_foreign_file_is_begun_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    assert load(tmp_path).all == ()
    assert learn(tmp_path, FOUR, (), ()).gpus == FOUR == load(tmp_path).gpus
    assert json.loads((tmp_path / FILE).read_text())["boot"] == load(tmp_path).boot
