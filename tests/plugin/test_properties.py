"""For any configuration, machine and order of kubelet's calls: nothing is counted twice, nothing raises.

Kubelet is played by a few sets, as the device manager keeps them: which IDs are listed, healthy and given.
"""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.config import ConfigError, NodeConfig
from kybernate.config.fields import PLACEMENTS
from kybernate.machine import Gpu, GpuEvent, Link, PcieLevel
from kybernate.pb import deviceplugin_pb2 as pb
from kybernate.topology import Group, plan, with_orphaned_seats
from services.plugin.allocations import FORGET_AFTER
from services.plugin.core.devices import NotGrantedError, Offer
from services.plugin.core.faults import Probation
from services.plugin.gate import StartGate
from services.plugin.servicer import NodeSeats

SEATS_DIR = Path("/run/kyb/seats")


@st.composite
def machines(draw: st.DrawFn) -> tuple[tuple[Gpu, ...], tuple[Link, ...]]:
    """1 to 8 GPUs on any NUMA nodes, with any links; minor and PCI numbers in any order."""
    count = draw(st.integers(1, 8))
    minors = draw(st.permutations(range(count)))
    buses = draw(st.permutations(range(count)))
    nodes = draw(st.lists(st.none() | st.integers(0, 1), min_size=count, max_size=count))
    gpus = tuple(
        Gpu(i, f"GPU-{i}", minors[i], f"0000:{buses[i]:02x}:00.0", "fake", 80 << 30, nodes[i]) for i in range(count)
    )
    levels = st.sampled_from(PcieLevel)
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    links = tuple(Link(f"GPU-{a}", f"GPU-{b}", draw(levels), draw(st.sampled_from([0, 12]))) for a, b in pairs)
    return gpus, links


@st.composite
def configs(draw: st.DrawFn) -> NodeConfig:
    """Some of the sizes 1, 2, 4, each with any strategy; disjoint or nested."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3, unique=True))
    profiles = []
    for size in sizes:
        seats = draw(st.integers(1, 4))
        profiles.append(
            {
                "name": f"p{size}",
                "resource": f"kyb.ai/gpu-{size}x-seat",
                "groupSize": size,
                "seatsPerGroup": seats,
                "activeSlots": draw(st.integers(1, seats)),
                "placement": draw(st.sampled_from(PLACEMENTS)),
                "exposeDevices": draw(st.sampled_from(["group", "node"])),
            }
        )
    overlap = draw(st.sampled_from(["none", "timeshare"]))
    text = json.dumps({"profiles": profiles, "gpuTopology": {"overlap": overlap}})
    return NodeConfig.model_validate_json(text)


def groups_of(config: NodeConfig, gpus: tuple[Gpu, ...], links: tuple[Link, ...]) -> tuple[Group, ...]:
    """Return the groups; none where the configuration does not fit the machine (a typed error)."""
    try:
        return plan(config, gpus, links).groups
    except ConfigError:
        return ()


@dataclass
class Kubelet:
    """What the device manager knows, and a plugin's node that it asks."""

    gpus: tuple[Gpu, ...]
    links: tuple[Link, ...]
    node: NodeSeats
    chance: random.Random
    given: dict[str, str] = field(default_factory=dict)
    """Pod by seat ID."""
    answers: dict[str, pb.ContainerAllocateResponse] = field(default_factory=dict)
    pods: int = 0
    reported: list[str] = field(default_factory=list)

    def admit(self, resource: str, containers: int) -> None:
        """A pod whose init containers, then its app container, use the same seat."""
        listed = self.node.offer.listed(resource, self.node.probation.faulty).devices
        healthy = {seat.ID for seat in listed if seat.health == "Healthy"}
        self.pods += 1
        reusable: list[str] = []
        for _ in range(containers):
            available = sorted((healthy - self.given.keys()) | set(reusable))
            if not available:
                return  # kubelet rejects the pod by itself
            self.chance.shuffle(available)
            chosen = self.node.preferred(resource, available, reusable, 1)
            assert set(chosen) <= set(available)
            assert len(chosen) in (0, 1)
            if reusable:
                assert list(chosen) == reusable
            seat = chosen[0] if chosen else available[0]
            self.given[seat] = f"pod-{self.pods}"
            self.allocate(resource, seat)
            reusable = [seat]

    def allocate(self, resource: str, seat: str) -> None:
        (answer,) = self.node.allocate(resource, [[seat]])
        assert answer == self.answers.setdefault(seat, answer)  # the same seat, the same answer
        assert answer.envs["KYB_GPU_SEAT"] == seat

    def wrong(self, resource: str) -> None:
        """Requests that only a broken kubelet or a stale list would make: refused, and nothing is allocated."""
        held = dict(self.node.allocations.seats)
        own = [seat.ID for seat in self.node.offer.listed(resource, frozenset()).devices]
        for seats in ([], ["9x-000000.s00"], own[:2] if len(own) > 1 else ["", "x"]):
            with pytest.raises(NotGrantedError, match=r"resources\.limits|delete the pod"):
                self.node.allocate(resource, [seats])
        assert self.node.allocations.seats == held

    def force_delete(self) -> None:
        """Remove a pod from kubelet's list at once; its seat may be allocated again at the next admission."""
        if self.given:
            del self.given[self.chance.choice(sorted(self.given))]

    def owners(self, looks: int) -> None:
        """List PodResources so many times."""
        resources = {seat: group.profile.resource for seat, group in self.node.offer.seats.items()}
        for _ in range(looks):
            self.node.allocations.observe({seat: resources[seat] for seat in self.given})

    def reload(self, config: NodeConfig) -> None:
        """Apply another configuration. Allocated seats must stay."""
        before = self.node.offer
        groups = groups_of(config, self.gpus, self.links)
        held = self.node.allocations.seats
        kept_groups, kept = with_orphaned_seats(groups, held.values(), self.gpus, former=before.groups)
        self.node.offer = Offer(kept_groups, self.gpus, SEATS_DIR, links=self.links, orphaned=kept)
        assert held.keys() <= self.node.offer.seats.keys()
        self.answers = {}  # names and device nodes may differ now
        for seat in self.given:
            assert self.node.offer.seats[seat].profile.resource == before.seats[seat].profile.resource
            assert self.node.offer.seats[seat].key == before.seats[seat].key

    def check(self) -> None:
        offer = self.node.offer
        everything = [seat.ID for resource in offer.resources for seat in offer.listed(resource, frozenset()).devices]
        assert len(everything) == len(set(everything)) == len(offer.seats)
        assert all(len(seat) <= 63 for seat in everything)
        assert len({group.name for group in offer.groups}) == len(offer.groups)
        assert self.given.keys() <= self.node.allocations.seats.keys()  # nothing in use is thought free
        faulty = self.node.probation.faulty
        for resource in offer.resources:
            for seat in offer.listed(resource, faulty).devices:
                own = {*offer.seats[seat.ID].uuids}
                assert seat.health == ("Healthy" if own.isdisjoint(faulty) else "Unhealthy")


steps = st.lists(
    st.tuples(
        st.sampled_from(["admit", "admit", "admit", "wrong", "delete", "owners", "xid", "read", "reload"]),
        st.integers(0, 99),
    ),
    max_size=40,
)


@given(machines(), configs(), st.lists(configs(), min_size=1, max_size=3), steps, st.integers())
def test_any_sequence_of_calls_and_faults_keeps_the_nodes_invariants(
    machine: tuple[tuple[Gpu, ...], tuple[Link, ...]],
    config: NodeConfig,
    others: list[NodeConfig],
    life: list[tuple[str, int]],
    seed: int,
) -> None:
    gpus, links = machine
    reported: list[str] = []
    offer = Offer(groups_of(config, gpus, links), gpus, SEATS_DIR, links=links)
    probation = Probation(frozenset(gpu.uuid for gpu in gpus))
    node = NodeSeats(offer, StartGate(SEATS_DIR), probation, reported.append)
    kubelet = Kubelet(gpus, links, node, random.Random(seed), reported=reported)
    kubelet.check()
    for what, number in life:
        resources: Any = node.offer.resources or ("kyb.ai/none",)
        resource = resources[number % len(resources)]
        match what:
            case "admit":
                kubelet.admit(resource, 1 + number % 3)
            case "wrong":
                kubelet.wrong(resource)
            case "delete":
                kubelet.force_delete()
            case "owners":
                kubelet.owners(1 + number % FORGET_AFTER)
            case "xid":
                probation.event(GpuEvent(f"GPU-{number % 9}" if number % 7 else None, number))
            case "read":
                probation.read(gpu.uuid for gpu in gpus if gpu.index != number)
            case "reload":
                kubelet.reload(others[number % len(others)])
        kubelet.check()
    kubelet.owners(FORGET_AFTER)
    assert node.allocations.seats.keys() == kubelet.given.keys()
