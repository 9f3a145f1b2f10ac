"""Durable state is lost while seats are parked: every model answers, and no operator is needed."""

import json
import shutil
from collections.abc import AsyncIterator, Iterable

import pytest
import pytest_asyncio

from kybernate.dev.stack import Stack
from tests.stack.client import Client, running
from tests.stack.pods import TWO_GROUPS, pod, small_node
from tests.until import until

pytestmark = [pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]
MODELS = "abcd"
LOST = {"records of parked seats": ("state/parked",), "state": ("state",), "everything": ("state", "run/seats")}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    async with running(small_node(tmp_path_factory.mktemp("node"), TWO_GROUPS, map(pod, MODELS), gpus=2)) as client:
        yield client


async def started_again(stack: Stack, *names: str, lost: Iterable[str] = ()) -> None:
    """Kill these services, remove these folders, and wait until all is ready."""
    before = dict(stack.starts)
    for name in names:
        stack.kill(name)
    for folder in lost:
        shutil.rmtree(stack.folder / folder)
    await until(lambda: all(stack.starts[name] > before[name] for name in names), what=f"{names} are back")
    await stack.ready(60)


async def test_parked_models_answer_after_nats_has_lost_its_store(here: Client) -> None:
    stack, store = here.stack, here.stack.folder / "nats" / "jetstream"
    assert store.is_dir()
    parked = [model for model, row in (await here.seats()).items() if row["state"] == "parked"]
    await stack.pause_nats()
    shutil.rmtree(store)
    await stack.resume_nats()
    await until(
        lambda: "bus init: changed: KYB_EVENTS" in stack.logs("nats"),
        what="the supervisor has made the streams again",
        saw=lambda: stack.logs("nats")[-500:],
    )
    await here.answered(*parked, *MODELS)
    await started_again(stack, "router")
    await here.answered(*MODELS)  # the roster is complete again: a router that starts now learns every seat


@pytest.mark.parametrize("lost", LOST)
async def test_all_models_answer_after_the_state_folder_was_lost(here: Client, lost: str) -> None:
    """With the seat folders, too, all engines are ended."""
    stack = here.stack
    await here.until_seats(lambda rows: "parked" in {row["state"] for row in rows.values()}, "one is parked")
    assert list((stack.folder / "state" / "parked").iterdir())
    learned = stack.logs("checkpointer").count("seat.learned")
    await started_again(stack, "checkpointer", "gpu_manager", "plugin", lost=LOST[lost])
    assert "quarantined" not in {row["state"] for row in (await here.seats()).values()}

    await here.answered(*MODELS)
    ended = [line for line in stack.logs("gpu_manager").splitlines() if '"seat.lost"' in line and " no ticket" in line]
    assert {json.loads(line)["model"] for line in ended} == ({*MODELS} if lost == "everything" else set())
    assert lost == "everything" or stack.logs("checkpointer").count("seat.learned") > learned
    assert "seat.quarantined" not in stack.logs("gpu_manager")
