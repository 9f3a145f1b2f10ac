"""Files that change while ``kyb up`` runs: what was checked is what is used, whole, or nothing is."""

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from kybernate.cli.output import CliError
from kybernate.config_errors import ConfigError
from kybernate.dev import up
from kybernate.dev.fakes.kubelet.http import application
from kybernate.dev.fakes.kubelet.kubelet import Kubelet
from kybernate.dev.stack import LAPTOP, Stack, StackOptions, options
from kybernate.dev.stack import add as adding
from kybernate.dev.stack.options import ChangingError
from kybernate.health import HttpServer
from tests.kubelet.stand import RESOURCE, registered, running_kubelet
from tests.until import until

POD = f"""
apiVersion: v1
kind: Pod
metadata: {{name: NAME, annotations: {{kyb.ai/backend: fake}}}}
spec:
  containers: [{{name: engine, image: fake, command: [sleep, "100"], resources: {{limits: {{{RESOURCE}: 1}}}}}}]
"""
CONFIG = f"profiles: [{{name: one, resource: {RESOURCE}, groupSize: 1, seatsPerGroup: 2}}]\n"


# --- the configuration ------------------------------------------------------------------------------------------------


@dataclass
class Reconfigured:
    """What ``reload_changes`` needs of a stack; ``taken`` are the contents that it was to use."""

    options: StackOptions = field(default_factory=StackOptions)
    plan: Any = field(default_factory=lambda: type("Plan", (), {"config_file": b"a"}))
    looks: list[bytes] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    taken: list[bytes] = field(default_factory=list)

    seen: bytes = b""

    def content(self, _: Path) -> bytes:
        self.seen = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        return self.seen

    def reconfigure(self) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.plan.config_file = self.seen
        self.taken.append(self.seen)


@pytest.mark.parametrize(
    ("looks", "errors", "taken"),
    [
        ("aabbb", [], "b"),
        ("bbb", [], "b"),  # written while the stack was starting
        ("aaxybb", [], "b"),  # half-written
        ("aa bb", [], "b"),  # truncated first, or away for a moment
        ("aabbb", [ChangingError("written")], "b"),
        ("aabbbccc", [ConfigError("wrong")], "c"),
        ("aabbbaabbbccc", [OSError("full")], "bc"),
    ],
)
async def test_a_change_is_used_once_it_is_whole(
    looks: str, errors: list[Exception], taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = [letter.strip().encode() for letter in looks]
    stack = Reconfigured(looks=contents, errors=errors)
    monkeypatch.setattr(up, "content", stack.content)
    monkeypatch.setattr(up, "RELOAD_SECONDS", 0.0)
    task = asyncio.create_task(up.reload_changes(stack, lambda _: None))  # type: ignore[arg-type]
    try:
        await until(lambda: len(stack.looks) == 1 and len(stack.taken) == len(taken), what=f"{taken} is used")
        assert [one.decode() for one in stack.taken] == list(taken)
    finally:
        task.cancel()


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stack:
    """One that has not been started, with its folder."""
    config, pods, folder = tmp_path / "config.yaml", tmp_path / "pods.yaml", tmp_path / "folder"
    config.write_text((LAPTOP / "config.yaml").read_text())
    pods.write_text((LAPTOP / "pods.yaml").read_text())
    monkeypatch.setattr(Stack, "folder", folder)
    made = Stack(StackOptions(config=config, pods=pods))
    folder.mkdir()
    (folder / "config.yaml").write_bytes(made.plan.config_file)
    (folder / "pods.yaml").write_bytes(made.plan.pod_file)
    return made


def test_a_configuration_that_is_written_while_it_is_checked_is_not_used(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, load = stack.options.config, options.load

    def slowly(path: Path) -> Any:
        config = load(path)
        file.write_text("profiles: []")
        return config

    monkeypatch.setattr(options, "load", slowly)
    before = (stack.folder / "config.yaml").read_bytes()
    with pytest.raises(ChangingError, match="was written while it was read; save it and try again"):
        stack.reconfigure()
    assert (stack.folder / "config.yaml").read_bytes() == before


def test_a_new_configuration_is_checked_with_the_pods_that_run(stack: Stack) -> None:
    assert stack.options.pods is not None
    stack.options.pods.write_text("no pod")  # for the next start
    stack.options.config.write_text(stack.options.config.read_text() + "\nwarmup: false\n")
    stack.reconfigure()
    assert b"warmup: false" in (stack.folder / "config.yaml").read_bytes()
    more = "".join(f"---{POD.replace('NAME', f'more-{n}').replace(RESOURCE, 'kyb.ai/gpu-1x-seat')}" for n in range(40))
    with (stack.folder / "pods.yaml").open("a") as file:
        file.write(more)
    stack.options.config.write_text(stack.options.config.read_text() + "\n# again\n")
    with pytest.raises(ConfigError, match="pods ask for it and this machine has"):
        stack.reconfigure()


def test_no_new_configuration_is_used_while_pods_are_added(stack: Stack) -> None:
    stack.options.config.write_text(stack.options.config.read_text() + "\nwarmup: false\n")
    before = (stack.folder / "config.yaml").read_bytes()
    with adding.alone(stack.folder):
        with pytest.raises(ChangingError, match="kyb add is at work on this stack"):
            stack.reconfigure()
        assert (stack.folder / "config.yaml").read_bytes() == before
    stack.reconfigure()
    assert b"warmup: false" in (stack.folder / "config.yaml").read_bytes()


# --- more pods --------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def node(folder: Path, *seats: str) -> AsyncIterator[tuple[Kubelet, dict[str, Any]]]:
    """A kubelet with seats, and the stack file of its stack."""
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "pods.yaml").write_text("")
    async with contextlib.AsyncExitStack() as opened:
        kubelet = await opened.enter_async_context(running_kubelet())
        if seats:
            await opened.enter_async_context(registered(kubelet, *seats))
        http = await opened.enter_async_context(HttpServer(application(kubelet), "127.0.0.1", 0))
        yield kubelet, {"folder": str(folder), "driver": "fake", "kubelets": [http.url]}


def written(folder: Path, *names: str) -> Path:
    """A file of Pods."""
    path = folder / f"{'-'.join(names)}.yaml"
    path.write_text("---".join(POD.replace("NAME", name) for name in names))
    return path


async def test_of_two_files_for_one_seat_one_is_added_and_the_other_refused(tmp_path: Path) -> None:
    async with node(tmp_path, "1x-abcdef.s00") as (kubelet, stack):
        both = [asyncio.to_thread(adding.add, stack, written(tmp_path, name)) for name in ("a", "b")]
        found = await asyncio.gather(*both, return_exceptions=True)
        refused = [one for one in found if isinstance(one, BaseException)]
        assert [str(one).partition(": ")[2] for one in refused] == [
            f"1 seats of {RESOURCE} are needed and {kubelet.options.node} has 0 free ones; "
            "remove pods, or raise seatsPerGroup of its profile"
        ]
        there = [pod.spec.name for pod in kubelet.pods]
        kept = [one["metadata"]["name"] for one in yaml.safe_load_all((tmp_path / "pods.yaml").read_text()) if one]
        assert len(there) == 1
        assert kept == there, "a kubelet that is started again has it"


async def test_of_a_file_with_a_pod_that_exists_none_is_added(tmp_path: Path) -> None:
    async with node(tmp_path, "1x-abcdef.s00", "1x-abcdef.s01", "1x-abcdef.s02") as (kubelet, stack):
        await asyncio.to_thread(adding.add, stack, written(tmp_path, "a"))
        with pytest.raises(CliError, match=r"has default/a already; rename it in the file"):
            await asyncio.to_thread(adding.add, stack, written(tmp_path, "b", "a"))
        assert [pod.spec.name for pod in kubelet.pods] == ["a"]


async def test_a_full_disk_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with node(tmp_path, "1x-abcdef.s00") as (kubelet, stack):
        monkeypatch.setattr(adding.files, "replace", full)
        with pytest.raises(CliError, match="No space left on device; the pods are created, but"):
            await asyncio.to_thread(adding.add, stack, written(tmp_path, "a"))
        assert [pod.spec.name for pod in kubelet.pods] == ["a"]


async def test_a_stack_that_is_starting_says_so(tmp_path: Path) -> None:
    file = written(tmp_path, "a")
    async with node(tmp_path) as (kubelet, stack):
        with pytest.raises(CliError, match=f"does not offer {RESOURCE} yet; wait until kyb up is ready"):
            await asyncio.to_thread(adding.add, stack, file)
        assert kubelet.pods == []
    with pytest.raises(CliError, match=r"kubelet does not answer: .*; wait until kyb up is ready"):
        await asyncio.to_thread(adding.add, stack, file)
    with pytest.raises(CliError, match="the stack has just ended"):
        adding.add(stack | {"folder": str(tmp_path / "gone")}, file)


async def test_a_file_of_pods_that_is_written_while_it_is_checked_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, load = written(tmp_path, "a"), adding.load_pods

    def slowly(*given: Any) -> Any:
        pods = load(*given)
        file.write_text(POD.replace("NAME", "b"))
        return pods

    async with node(tmp_path, "1x-abcdef.s00") as (kubelet, stack):
        monkeypatch.setattr(adding, "load_pods", slowly)
        with pytest.raises(ConfigError, match="was written while it was read"):
            await asyncio.to_thread(adding.add, stack, file)
        assert kubelet.pods == []
