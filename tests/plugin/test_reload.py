"""Configuration changes of a running plugin: allocated seats stay, whether or not they are configured."""

import asyncio
import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

from kybernate.config import NodeConfig
from kybernate.files import changes, fingerprint
from kybernate.topology import AllocatedSeat, Group, plan, with_orphaned_seats
from services.plugin import allocations
from services.plugin.allocations import FORGET_AFTER, Allocations
from tests.kubelet.stand import pod, until_capacity
from tests.plugin.processes import (
    PATIENCE,
    all_logged,
    driver,
    environment,
    machine,
    plugin,
    process,
    readyz,
    until_logged,
    until_readyz,
    until_stored,
)
from tests.plugin.stand import GPUS, ONE, TWO, config, offer, ready, until_ready
from tests.until import until


def groups(**changed: Any) -> tuple[Group, ...]:
    return plan(NodeConfig.model_validate_json(json.dumps(config() | changed)), GPUS).groups


def with_seats(number: int) -> tuple[Group, ...]:
    profiles = [profile | {"seatsPerGroup": number} for profile in config()["profiles"]]
    return groups(profiles=profiles)


def only_ones() -> tuple[Group, ...]:
    four = [{"name": f"N{i}", "gpus": [i]} for i in range(4)]
    return groups(profiles=config()["profiles"][:1], gpuTopology={"groups": four})


def test_a_shrunk_group_keeps_its_allocated_seats() -> None:
    before, after = with_seats(3), with_seats(1)
    third = before[0].seat_ids[2]
    found, kept = with_orphaned_seats(after, [AllocatedSeat(third, ONE)], GPUS, former=before)
    assert found[0].seat_ids == (after[0].seat_ids[0], third)
    assert found[1:] == after[1:]
    assert kept == {third}


def test_a_removed_group_keeps_its_allocated_seats_and_is_renamed_if_its_name_is_taken() -> None:
    (pair,) = (group for group in groups() if group.name == "G23")
    allocated = [AllocatedSeat(pair.seat_ids[1], TWO)]
    found, kept = with_orphaned_seats(only_ones(), allocated, GPUS, former=groups())
    assert [group.name for group in found] == ["N0", "N1", "N2", "N3", "G23"]
    assert (found[-1].gpus, found[-1].seat_ids, kept) == (pair.gpus, (pair.seat_ids[1],), {pair.seat_ids[1]})
    taken = (dataclasses.replace(only_ones()[0], name="G23"),)
    assert with_orphaned_seats(taken, allocated, GPUS, former=groups())[0][-1].name == f"2x-{pair.key}"


def test_a_plugin_that_starts_with_another_configuration_rebuilds_the_group_from_its_recorded_gpus() -> None:
    (pair,) = (group for group in groups() if group.name == "G23")
    allocated = AllocatedSeat(pair.seat_ids[0], TWO, pair.uuids)
    found, _ = with_orphaned_seats(only_ones(), [allocated], GPUS)
    assert (found[-1].key, found[-1].gpus, found[-1].profile.resource) == (pair.key, pair.gpus, TWO)


def test_a_seat_without_usable_recorded_gpus_gets_the_group_that_its_key_is_the_hash_of() -> None:
    (pair,) = (group for group in groups() if group.name == "G23")
    for gpus in ((), ("GPU-0", "GPU-1"), ("GPU-2", "GPU-9")):
        found, kept = with_orphaned_seats(only_ones(), [AllocatedSeat(pair.seat_ids[0], TWO, gpus)], GPUS)
        assert (found[-1].gpus, found[-1].seat_ids, kept) == (pair.gpus, pair.seat_ids[:1], set(pair.seat_ids[:1]))


def test_the_search_for_a_groups_gpus_tries_as_many_of_the_first_gpus_as_it_can() -> None:
    removed = [dataclasses.replace(GPUS[0], uuid=f"GPU-removed-{i}", index=100 + i) for i in range(300)]
    (pair,) = (group for group in groups() if group.name == "G23")
    seat = AllocatedSeat(pair.seat_ids[0], TWO)
    assert with_orphaned_seats(only_ones(), [seat], [*GPUS, *removed])[0][-1].gpus == pair.gpus
    assert with_orphaned_seats(only_ones(), [seat], [*removed, *GPUS]) == (only_ones(), frozenset())


def test_a_seat_allocated_under_a_resources_old_name_is_not_offered_under_the_new_one() -> None:
    renamed = [config()["profiles"][0] | {"resource": "kyb.ai/small"}, config()["profiles"][1]]
    seat = groups()[0].seat_ids[0]
    found, kept = with_orphaned_seats(groups(profiles=renamed), [AllocatedSeat(seat, ONE)], GPUS, former=groups())
    offered = {s: group.profile.resource for group in found for s in group.seat_ids}
    assert offered[seat] == ONE
    assert len(offered) == sum(len(group.seat_ids) for group in found)
    assert kept == {seat}


def test_an_allocated_seat_of_unknown_gpus_is_left_out() -> None:
    found, kept = with_orphaned_seats(
        groups(), [AllocatedSeat("1x-000000.s00", ONE), AllocatedSeat("nonsense", ONE)], GPUS
    )
    assert (found, kept) == (groups(), frozenset())


def test_an_orphaned_seat_is_listed_and_answered_but_never_preferred() -> None:
    before, after = with_seats(3), with_seats(1)
    third = before[0].seat_ids[2]
    found, kept = with_orphaned_seats(after, [AllocatedSeat(third, ONE)], GPUS, former=before)
    node = offer(groups=found, orphaned=kept)
    assert third in {seat.ID for seat in node.listed(ONE, frozenset()).devices}
    assert node.answer(ONE, [third]).envs["KYB_GPU_GROUP"] == "G0"
    assert node.preferred([third], (), 1, frozenset()) == ()


def test_a_seat_is_forgotten_after_several_lists_without_it() -> None:
    known = Allocations()
    known.allocate(AllocatedSeat("s1", ONE, ("GPU-0",)))
    for _ in range(FORGET_AFTER - 1):
        assert not known.observe({})
        assert not known.settled
    assert not known.observe({"s1": ONE})
    assert known.settled
    assert [known.observe({"s2": TWO}) for _ in range(FORGET_AFTER)] == [True, False, True]
    assert known.seats.keys() == {"s2"}


def test_allocations_survive_on_disk(tmp_path: Path) -> None:
    known = Allocations()
    known.allocate(AllocatedSeat("s1", ONE, ("GPU-0",), ("GPU-0", "GPU-1")))
    known.observe({"s1": ONE, "s2": TWO})
    assert allocations.load(tmp_path) == Allocations()
    allocations.save(tmp_path / "new", allocations.dump(known))
    assert (tmp_path / "new" / allocations.FILE).stat().st_mode & 0o777 == 0o600
    assert allocations.load(tmp_path / "new") == Allocations(known.seats)
    assert [path.name for path in (tmp_path / "new").iterdir()] == [allocations.FILE]


def test_a_file_of_an_earlier_version_is_read_and_an_invalid_one_is_ignored(tmp_path: Path) -> None:
    earlier = {"seats": [{"seat": "s1", "resource": ONE, "gpus": ["GPU-0"]}], "groups": {"abcdef": ["GPU-0"]}}
    (tmp_path / allocations.FILE).write_text(json.dumps(earlier))
    assert allocations.load(tmp_path).seats == {"s1": AllocatedSeat("s1", ONE, ("GPU-0",))}
    for text in ('{"seats": [{}]}', "[]", "{"):
        (tmp_path / allocations.FILE).write_text(text)
        assert allocations.load(tmp_path) == Allocations()


async def test_a_swapped_config_map_is_a_change_and_so_is_a_signal(tmp_path: Path) -> None:
    for version in ("one", "two"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "config.yaml").write_text("same")
    (tmp_path / "..data").symlink_to("one")
    file = tmp_path / "config.yaml"
    file.symlink_to("..data/config.yaml")
    poke = asyncio.Event()
    found = changes(file, poke, seconds=0.01)
    first = asyncio.create_task(anext(found))
    await asyncio.wait_for(first, PATIENCE)  # at once: the file may have changed before the first check
    for version in ("two", "one"):
        (tmp_path / "..new").symlink_to(version)
        os.replace(tmp_path / "..new", tmp_path / "..data")
        await asyncio.wait_for(anext(found), PATIENCE)
    poke.set()
    await asyncio.wait_for(anext(found), PATIENCE)
    await found.aclose()
    assert fingerprint(tmp_path / "nothing") == ()
    assert len(fingerprint(tmp_path)) == 1 + 2  # hidden names belong to Kubernetes


def write(folder: Path, **changed: Any) -> None:
    (folder / "new.yaml").write_text(json.dumps(config() | changed))
    (folder / "new.yaml").replace(folder / "config.yaml")


async def test_resources_are_added_and_removed_and_an_allocated_seat_stays_until_its_pod_is_gone() -> None:
    async with machine() as (kubelet, folder), driver(folder), plugin(folder, kubelet.options.folder) as log:
        await until_ready(kubelet, timeout=PATIENCE)
        owner = kubelet.create(pod(resource=TWO))
        await until_stored(folder)
        untouched = kubelet.devices.endpoints[ONE].plugin
        (allocation,) = kubelet.devices.allocations
        (seat,) = allocation.device_ids
        write(folder, profiles=[config()["profiles"][0], config()["profiles"][1] | {"resource": "kyb.ai/pair"}])
        await until_capacity(kubelet, {ONE: (4, 4), TWO: (1, 1), "kyb.ai/pair": (1, 1)}, timeout=PATIENCE)
        assert set(kubelet.devices.endpoints[TWO].devices) == {seat}
        assert seat not in kubelet.devices.endpoints["kyb.ai/pair"].devices
        assert kubelet.devices.endpoints[ONE].plugin is untouched
        kubelet.delete(owner.spec.namespace, owner.spec.name, grace_seconds=0)
        capacity = kubelet.devices.capacity
        await until(
            lambda: (capacity()["kyb.ai/pair"], capacity()[TWO][1]) == ((2, 2), 0),
            what="kyb.ai/pair has its seat, and the old resource none",
            saw=capacity,
            timeout=PATIENCE,
        )
        assert kubelet.devices.endpoints[ONE].plugin is untouched
        assert all_logged(log, "plugin.withdrawn")[0]["resource"] == TWO


async def test_a_plugin_that_starts_with_another_configuration_keeps_allocated_seats() -> None:
    async with machine() as (kubelet, folder), driver(folder):
        async with plugin(folder, kubelet.options.folder, "one"):
            await until_ready(kubelet, timeout=PATIENCE)
            kubelet.create(pod(resource=TWO))
            await until(lambda: kubelet.devices.allocations, what="kubelet has allocated a seat", timeout=PATIENCE)
        (seat,) = kubelet.devices.allocations[0].device_ids
        env = environment(folder, kubelet.options.folder)
        four = [{"name": f"N{i}", "gpus": [i]} for i in range(4)]
        write(folder, profiles=config()["profiles"][:1], gpuTopology={"groups": four})
        async with process("-m", "services.plugin", log=folder / "two.log", **env):
            await until_capacity(kubelet, {ONE: (8, 8), TWO: (1, 1)}, timeout=PATIENCE)
            assert set(kubelet.devices.endpoints[TWO].devices) == {seat}


async def test_an_invalid_configuration_is_reported_and_the_last_valid_one_stays() -> None:
    async with machine() as (kubelet, folder):
        env = environment(folder, kubelet.options.folder)
        log = folder / "plugin.log"
        async with driver(folder), process("-m", "services.plugin", log=log, **env) as running:
            await until_ready(kubelet, timeout=PATIENCE)
            (folder / "config.yaml").write_text("profiles: []")
            assert "config.yaml" in (await until_logged(log, "config.refused"))["reason"]
            status, body = await readyz(log)
            assert status == 503
            assert "is not used, the one before is" in body["unmet"]["config"]
            assert ready(kubelet)
            (folder / "config.yaml").write_text(json.dumps(config()))
            running.send_signal(signal.SIGHUP)
            await until_logged(log, "config.applied")
            await until_readyz(log)
