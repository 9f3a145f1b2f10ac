"""Files that change while ``kyb up`` runs: what was checked is what is used, whole, or nothing is."""

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from kybernate.cli.output import CliError
from kybernate.config_errors import ConfigError
from kybernate.dev import up
from kybernate.dev.fakes.kubelet.__main__ import follow
from kybernate.dev.fakes.kubelet.http import application
from kybernate.dev.fakes.kubelet.kubelet import Kubelet
from kybernate.dev.local import local_facts
from kybernate.dev.stack import LAPTOP, Stack, StackOptions, options
from kybernate.dev.stack import pod_changes as adding
from kybernate.dev.stack.layout import Ports
from kybernate.dev.stack.options import ChangingError
from kybernate.http.server import HttpServer
from tests.kubelet.stand import RESOURCE, pod, registered, running_kubelet
from tests.until import until

POD = f"""
apiVersion: v1
kind: Pod
metadata: {{name: NAME, annotations: {{kyb.ai/backend: fake}}}}
spec:
  containers: [{{name: engine, image: fake, command: [sleep, "100"], resources: {{limits: {{{RESOURCE}: 1}}}}}}]
"""
CONFIG = f"profiles: [{{name: one, resource: {RESOURCE}, groupSize: 1, seatsPerGroup: 1}}]\n"


# --- the configuration ------------------------------------------------------------------------------------------------


@dataclass
class Reconfigured:
    """What ``reload_changes`` needs of a stack; ``taken`` are the contents that it was to use."""

    options: StackOptions = field(default_factory=StackOptions)
    plan: Any = field(default_factory=lambda: type("Plan", (), {"sources": (b"a", b"pods")}))
    looks: list[bytes] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    taken: list[bytes] = field(default_factory=list)

    seen: bytes = b""
    folder: Path = Path("/nowhere")

    def content(self, _: Path) -> bytes:
        self.seen = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        return self.seen

    def reconfigure(self) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.plan.sources = (self.seen, b"pods")
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


@pytest.mark.parametrize("name", ["config.yaml", "pods.yaml"])
@pytest.mark.parametrize(
    "damage", [lambda file: file.write_text("a: ["), lambda file: file.write_text(""), Path.unlink]
)
async def test_the_doctor_names_a_refused_file_until_it_is_repaired(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, damage: Callable[[Path], Any]
) -> None:
    monkeypatch.setattr(up, "RELOAD_SECONDS", 0.0)
    file = tmp_path / name
    sound = file.read_text()

    def refused() -> str:
        return str(local_facts({"folder": str(stack.folder)}, ())["refused"])

    task = asyncio.create_task(up.reload_changes(stack, lambda _: None))
    try:
        damage(file)
        await until(lambda: str(file) in refused(), what="the doctor names the file", saw=refused)
        file.write_text(sound)
        await until(lambda: not refused(), what="nothing is refused", saw=refused)
    finally:
        task.cancel()


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


def test_a_new_configuration_is_checked_with_the_pods_of_the_file_and_both_are_used_or_none(stack: Stack) -> None:
    pods = stack.options.pods
    assert pods is not None
    known = pods.read_text()
    stack.options.config.write_text(stack.options.config.read_text() + "\nwarmup: false\n")
    pods.write_text("no pod")
    with pytest.raises(ConfigError, match="is not a Pod"):
        stack.reconfigure()
    assert b"warmup: false" not in (stack.folder / "config.yaml").read_bytes()
    pods.write_text(known.replace("qwen3-32b", "qwen4-32b"))
    stack.reconfigure()
    assert b"warmup: false" in (stack.folder / "config.yaml").read_bytes()
    assert "qwen4-32b" in (stack.folder / "pods.yaml").read_text()
    more = "".join(f"---{POD.replace('NAME', f'more-{n}').replace(RESOURCE, 'kyb.ai/gpu-1x-seat')}" for n in range(40))
    with pods.open("a") as file:
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
        await opened.enter_async_context(HttpServer(application(kubelet), "127.0.0.1", 0))
        following = asyncio.create_task(follow(kubelet, folder / "pods.yaml", [folder / "pods.yaml"]))
        opened.callback(following.cancel)
        yield kubelet, {"folder": str(folder), "driver": "fake", "gpus": max(1, len(seats)), "memory": "80GiB"}


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
            f"{RESOURCE}: 2 pods ask for it and this machine has 1 seats of it; "
            "remove pods or raise seatsPerGroup of its profile"
        ]
        kept = [one["metadata"]["name"] for one in yaml.safe_load_all((tmp_path / "pods.yaml").read_text()) if one]
        assert len(kept) == 1
        await until(lambda: [pod.spec.name for pod in kubelet.pods] == kept, what="kubelet has it")


async def test_of_a_file_with_a_pod_that_exists_none_is_added(tmp_path: Path) -> None:
    async with node(tmp_path, "1x-abcdef.s00", "1x-abcdef.s01", "1x-abcdef.s02") as (_, stack):
        await asyncio.to_thread(adding.add, stack, written(tmp_path, "a"))
        before = (tmp_path / "pods.yaml").read_bytes()
        with pytest.raises(CliError, match=r"the stack has default/a already; rename it, or kyb remove it first"):
            await asyncio.to_thread(adding.add, stack, written(tmp_path, "b", "a"))
        assert (tmp_path / "pods.yaml").read_bytes() == before


async def test_a_full_disk_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with node(tmp_path, "1x-abcdef.s00") as (_, stack):
        monkeypatch.setattr(adding.files, "replace", full)
        with pytest.raises(CliError, match="No space left on device; nothing has changed"):
            await asyncio.to_thread(adding.add, stack, written(tmp_path, "a"))
        assert (tmp_path / "pods.yaml").read_text() == ""


async def test_a_pod_that_the_stack_would_refuse_is_not_added(tmp_path: Path) -> None:
    """``kyb add`` once took it, the stack refused its whole file, and so did the next ``kyb up``."""
    file = written(tmp_path, "a")
    async with node(tmp_path, "1x-abcdef.s00") as (kubelet, stack):
        for note, text in (
            ("kyb.ai/vram: 200GiB", r"pod a: .*200"),
            ("kyb.ai/prefer-group: G7", r"pod a: kyb\.ai/prefer-group: 'G7': is no group"),
        ):
            file.write_text(POD.replace("NAME", "a").replace("{kyb.ai/backend", f"{{{note}, kyb.ai/backend"))
            with pytest.raises(ConfigError, match=text) as refused:
                await asyncio.to_thread(adding.add, stack, file)
            assert str(refused.value).startswith(f"{tmp_path / 'pods.yaml'}")
        assert (tmp_path / "pods.yaml").read_text() == ""
        assert kubelet.pods == []
    with pytest.raises(CliError, match="the stack has just ended"):
        adding.add(stack | {"folder": str(tmp_path / "gone")}, file)


async def test_the_stack_file_of_a_version_before_names_no_gpus(tmp_path: Path) -> None:
    """After ``pipx upgrade`` and a reload the supervisor is the old one."""
    async with node(tmp_path, "1x-abcdef.s00") as (_, stack):
        old = {name: value for name, value in stack.items() if name not in ("gpus", "memory")}
        assert await asyncio.to_thread(adding.add, old, written(tmp_path, "a"))


async def test_a_link_to_the_file_of_pods_stays_one(tmp_path: Path) -> None:
    (own := tmp_path / "models.yaml").write_text("")
    (link := tmp_path / "link.yaml").symlink_to(own)
    async with node(tmp_path, "1x-abcdef.s00") as (_, stack):
        await asyncio.to_thread(adding.add, stack | {"pods": str(link)}, written(tmp_path, "a"))
    assert link.is_symlink()
    assert "name: a" in own.read_text()


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


# --- models come, change and go ---------------------------------------------------------------------------------------


def names(kubelet: Kubelet) -> dict[str, str]:
    """Name and id of kubelet's pods that are not ending."""
    return {pod.spec.name: pod.uid for pod in kubelet.pods if not pod.deleted_at}


async def test_kubelet_follows_its_file_and_leaves_what_has_not_changed(tmp_path: Path) -> None:
    file = tmp_path / "pods.yaml"
    async with node(tmp_path, *(f"1x-abcdef.s0{number}" for number in range(4))) as (kubelet, _):
        kubelet.create(pod("by-call", seats=0))
        file.write_text("---".join(POD.replace("NAME", name) for name in ("a", "b", "c")))
        await until(lambda: len(names(kubelet)) == 4, what="three pods came")
        before = names(kubelet)
        file.write_text("---".join((POD.replace("NAME", "a"), POD.replace("NAME", "b").replace("100", "200"))))
        await until(lambda: set(names(kubelet)) == {"a", "b", "by-call"}, what="one went")
        await until(lambda: names(kubelet)["b"] != before["b"], what="one was made anew")
        assert {name: names(kubelet)[name] for name in ("a", "by-call")} == {
            name: before[name] for name in ("a", "by-call")
        }
        file.write_text("kind: Pot")
        await asyncio.sleep(1)
        assert set(names(kubelet)) == {"a", "b", "by-call"}


async def test_a_model_is_a_command_line_and_is_removed_by_its_name(tmp_path: Path) -> None:
    own = tmp_path / "models.yaml"
    own.write_text("# mine\n")
    async with node(tmp_path, "1x-abcdef.s00", "1x-abcdef.s01") as (_, stack):
        stack |= {"pods": str(own)}
        command = ("llama-server", "-m", "q.gguf", "--port", "9001")
        added = await asyncio.to_thread(adding.add_command, stack, "Qwen3.8b", command)
        assert [(pod.name, pod.model, pod.port) for pod in added] == [("qwen3-8b", "Qwen3.8b", 9001)]
        [made] = yaml.safe_load_all(own.read_text())
        assert made["spec"]["containers"][0]["command"] == list(command)
        assert made["metadata"]["annotations"]["kyb.ai/backend"] == "restart"
        shell = ("sh", "-c", "serve --port 9001; mkdir -p 1")
        assert "kyb.ai/port: '9001'" in adding.pod_of("b", shell, "kyb.ai/gpu-1x-seat", fakes=True)
        with pytest.raises(CliError, match=r"names no port, and each engine needs its own; write: .*--port \d+"):
            await asyncio.to_thread(adding.add_command, stack, "b", ("llama-server", "-m", "q.gguf"))
        with pytest.raises(
            ConfigError, match=r"models\.yaml:\d+: .*port 9001 of this machine is that of pod qwen3-8b; give"
        ):
            await asyncio.to_thread(adding.add_command, stack, "b", command)
        ports = Ports()
        own_port = ports.free()
        with pytest.raises(
            ConfigError,
            match=rf"models\.yaml: port {own_port} of this machine is one of the stack's own: give pod b ano",
        ):
            await asyncio.to_thread(adding.add_command, stack, "b", ("server", "--port", str(own_port)))
        ports.release()
        (nothing := tmp_path / "nothing.yaml").write_text("# later\n")
        with pytest.raises(ConfigError, match=r"nothing\.yaml: has no pods; write at least one"):
            await asyncio.to_thread(adding.add, stack, nothing)
        await asyncio.to_thread(adding.add, stack, written(tmp_path, "b"))
        with pytest.raises(CliError, match=r"has no model 'c'; it has Qwen3\.8b, b"):
            adding.remove(stack, "c")
        assert adding.remove(stack, "Qwen3.8b") == ["qwen3-8b"]
        assert own.read_text().startswith("# mine\n---\n\napiVersion")
        assert adding.remove(stack, "b") == ["b"]
        assert own.read_text() == "# mine\n# Pods of kyb up, one seat each: kyb add\n"


async def test_a_model_whose_port_another_process_has_is_added_and_the_reason_why_it_waits_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with node(tmp_path, "1x-abcdef.s00") as (_, stack):
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            port = other.getsockname()[1]
            await asyncio.to_thread(adding.add_command, stack, "b", ("server", "--port", str(port)))
    text = f"kyb: warning: hostNetwork: port {port} of 127.0.0.1 is taken; give each such pod its own kyb.ai/port\n"
    assert capsys.readouterr().err == text


async def test_a_file_whose_command_names_another_port_is_added_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with node(tmp_path, "1x-abcdef.s00") as (_, stack):
        (file := tmp_path / "b.yaml").write_text(POD.replace("NAME", "b").replace('"100"', '--port, "9001"'))
        await asyncio.to_thread(adding.add, stack, file)
    text = "pod b: its engine is called at kyb.ai/port, which is 8000, and its command has --port 9001"
    assert capsys.readouterr().err == f"kyb: warning: {text}\n"


def test_a_model_in_a_list_is_not_cut_out(tmp_path: Path) -> None:
    one = yaml.safe_load(POD.replace("NAME", "a"))
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "pods.yaml").write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": [one]}))
    with pytest.raises(CliError, match=r"a is in a List of .*; take it out with kyb edit"):
        adding.remove({"folder": str(tmp_path)}, "a")


async def test_what_is_edited_is_checked_and_a_wrong_draft_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pods.yaml"
    monkeypatch.delenv("VISUAL", raising=False)
    async with node(tmp_path, "1x-abcdef.s00") as (_, stack):
        file.write_text(POD.replace("NAME", "a"))
        for editor, changed in (("true", False), ("sed -i s/100/200/", True)):
            monkeypatch.setenv("EDITOR", editor)
            assert await asyncio.to_thread(adding.edit, stack) is changed
        assert "200" in (before := file.read_text())
        for editor, text in (
            ("sed -i s/Pod/Pot/", r"pods\.yaml:\d+: kind: 'Pot': is not a Pod.*\n.*kept in (\S+)"),
            ("false", r"false ended with code 1; nothing has changed\n.*kept in (\S+)"),
        ):
            monkeypatch.setenv("EDITOR", editor)
            with pytest.raises(CliError, match=text) as refused:
                await asyncio.to_thread(adding.edit, stack)
            (draft := Path(str(refused.value).split()[-1])).unlink()
            assert draft.parent == Path(stack["folder"]), "where a killed kyb edit leaves it, it goes with the stack"

        def full(*_: Any, **__: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setenv("EDITOR", "sed -i s/200/300/")
        monkeypatch.setattr(adding, "check", full)
        with pytest.raises(CliError, match=r"No space left on device\n.*kept in (\S+)") as refused:
            await asyncio.to_thread(adding.edit, stack)
        draft = Path(str(refused.value).split()[-1])
        assert "300" in draft.read_text()
        draft.unlink()
        monkeypatch.setenv("EDITOR", "no-such-editor")
        with pytest.raises(CliError, match="no-such-editor: No such file or directory; set EDITOR"):
            await asyncio.to_thread(adding.edit, stack)
        assert file.read_text() == before
        file.unlink()
        os.mkfifo(file)
        with pytest.raises(OSError, match="it is a FIFO, a socket or a device, not a file"):
            await asyncio.to_thread(adding.edit, stack)
        file.unlink()
