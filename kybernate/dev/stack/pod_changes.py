"""``kyb add``, ``kyb remove`` and ``kyb edit``: the pods of a stack that runs.

Each changes the file of Pods: that of ``kyb up --pods``, which a later start has, too; without one the stack's own.
The stack's kubelets follow it.
"""

import fcntl
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from kybernate import files
from kybernate.annotations import BACKEND, MODEL, PORT, backend_option
from kybernate.cli.output import CliError
from kybernate.config import load
from kybernate.config_errors import ConfigError
from kybernate.dev.fakes.kubelet.process import StartError, host_address
from kybernate.dev.nats_server import free_port
from kybernate.dev.stack.layout import HOST, Ports
from kybernate.dev.stack.options import (
    BACKENDS,
    ChangingError,
    StackOptions,
    check,
    check_manifests,
    check_unchanged,
    content,
)
from kybernate.dev.stack.pod_file import StackPod, engine_ports, load_pods, other_ports, port_options
from kybernate.engines import RESTART

_EMPTY = "# Pods of kyb up, one seat each: kyb add\n"


def add(stack: Mapping[str, Any], file: Path) -> tuple[StackPod, ...]:
    """Check a file of Pods and add them to those of the stack, whose stack file this is; returns the new ones. Another
    change waits meanwhile.

    Raises ConfigError for a mistake in the file or missing seats, CliError where a pod exists already; then nothing has
    changed.
    """
    folder = Path(stack["folder"])
    with alone(folder):
        text = content(file)
        pods = load_pods(file, load(folder / "config.yaml"), BACKENDS[stack["driver"]])
        check_manifests(file)
        check_unchanged(file, text)
        if not pods:
            raise ConfigError(f"{file}: has no pods; write at least one")
        return _append(stack, str(file), pods, text.decode())


def add_command(stack: Mapping[str, Any], model: str, command: Sequence[str]) -> tuple[StackPod, ...]:
    """The same for a model whose engine is this command line, which names its port."""
    folder = Path(stack["folder"])
    with alone(folder), tempfile.TemporaryDirectory(prefix="kyb-") as drafts:
        config = load(folder / "config.yaml")
        resource = min(config.profiles, key=lambda profile: profile.group_size).resource
        file = Path(drafts) / "pod.yaml"
        file.write_text(pod_of(model, command, resource, fakes=BACKENDS[stack["driver"]] == "fake"))
        pods = load_pods(file, config, BACKENDS[stack["driver"]])
        check_manifests(file)
        return _append(stack, model, pods, file.read_text())


def pod_of(model: str, command: Sequence[str], resource: str, *, fakes: bool) -> str:
    """The Pod of an engine that listens on its own port of this machine. Raises CliError if the command names none.

    ``fakes``: GPUs on which no process of CUDA can be parked; the engine is then parked by restart.
    """
    ports = dict(port_options({"command": command}))
    port = ports.get("--port", ports.get("-p"))
    if port is None:
        remedy = f"kyb add {model} -- {shlex.join(command)} --port {free_port()}"
        raise CliError(f"{model}: the command names no port, and each engine needs its own; write: {remedy}", 2)
    container: dict[str, Any] = {"name": "engine", "image": Path(command[0]).name, "command": list(command)}
    container["resources"] = {"limits": {resource: 1}}
    notes = {MODEL: model, PORT: str(port)}
    if fakes and not backend_option(container):
        notes[BACKEND] = RESTART
    name = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-") or "model"
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "annotations": notes}}
    return yaml.safe_dump(pod | {"spec": {"hostNetwork": True, "containers": [container]}}, sort_keys=False)


def remove(stack: Mapping[str, Any], model: str) -> list[str]:
    """Take every pod of a model out; returns their names. Raises CliError for an unknown one."""
    folder = Path(stack["folder"])
    with alone(folder):
        config, file = load(folder / "config.yaml"), _file(stack)
        pods = load_pods(file, config, "any")
        gone = {(pod.namespace, pod.name) for pod in pods if pod.model == model}
        if not gone:
            known = ", ".join(sorted({pod.model for pod in pods})) or "none"
            raise CliError(f"{file} has no model {model!r}; it has {known}")
        parts = _documents(file.read_text())
        if not gone <= {name for part in parts for name in _names(part)}:
            raise CliError(f"{model} is in a List of {file}; take it out with kyb edit")
        kept = [part for part in parts if not _names(part) & gone]
        _replace(file, "".join(kept if len(pods) > len(gone) else [*kept, _EMPTY]))
        return [name for _, name in sorted(gone)]


def edit(stack: Mapping[str, Any]) -> bool:
    """Open the file of Pods in ``$VISUAL``, ``$EDITOR`` or vi, check what was written, and use it; False: it is as
    before. Raises CliError, which names the draft, for what cannot be used. The draft ends with the stack at the
    latest."""
    file = _file(stack)
    before = files.read(file).decode()
    handle, name = tempfile.mkstemp(prefix="kyb-pods-", suffix=".yaml", dir=stack["folder"], text=True)
    draft = Path(name)
    with os.fdopen(handle, "w") as opened:
        opened.write(before)
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    try:
        code = subprocess.run([*shlex.split(editor), name], check=False).returncode
    except OSError as error:
        draft.unlink()
        raise CliError(f"{editor}: {error.strerror}; set EDITOR") from None
    try:
        after = draft.read_text()
        if code:
            raise CliError(f"{editor} ended with code {code}; nothing has changed")
        if after != before:
            with alone(Path(stack["folder"])):
                check_unchanged(file, before.encode())
                _check(stack, after)
                _replace(file, after)
    except (CliError, ConfigError, OSError, UnicodeError) as error:
        raise CliError(f"{error}\nwhat you wrote is kept in {draft}") from None
    draft.unlink()
    return after != before


@contextmanager
def alone(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Until the block ends nothing else changes the pods or the configuration of this stack. Raises CliError where
    there is no stack; without ``wait``, ChangingError while something else does."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        raise CliError("the stack has just ended; kyb up starts one") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ChangingError("kyb add is at work on this stack; try again when it has ended") from None
        yield
    finally:
        os.close(lock)


def _file(stack: Mapping[str, Any]) -> Path:
    return Path(stack.get("pods") or Path(stack["folder"]) / "pods.yaml").resolve()


def _append(stack: Mapping[str, Any], origin: str, pods: Sequence[StackPod], text: str) -> tuple[StackPod, ...]:
    file = _file(stack)
    known = {(pod.namespace, pod.name) for pod in load_pods(file, load(Path(stack["folder"]) / "config.yaml"), "any")}
    if again := [f"{pod.namespace}/{pod.name}" for pod in pods if (pod.namespace, pod.name) in known]:
        raise CliError(f"{origin}: the stack has {', '.join(again)} already; rename it, or kyb remove it first")
    before = file.read_text()
    after = f"{before.rstrip()}\n---\n{text}" if before.strip() else text
    _check(stack, after)
    for text in other_ports(pods):
        sys.stderr.write(f"kyb: warning: {text}\n")
    _replace(file, after)
    return tuple(pods)


def _check(stack: Mapping[str, Any], text: str) -> None:
    """Raise ConfigError if the stack would refuse this file of Pods, or a new engine would have one of its ports."""
    file, folder = _file(stack), Path(stack["folder"])
    hardware = {name: stack[name] for name in ("driver", "preset", "gpus", "memory") if name in stack}
    with tempfile.TemporaryDirectory(prefix="kyb-") as drafts:
        draft = Path(drafts) / "pods.yaml"
        draft.write_text(text)
        try:
            plan = check(StackOptions(config=folder / "config.yaml", pods=draft, **hardware))
            new = plan.engine_ports.keys() - engine_ports(load_pods(file, plan.config, "any")).keys()
            for port in sorted(one for one in new if Ports.reserved(one)):
                what = f"port {port} of this machine is one of the stack's own: give pod {plan.engine_ports[port]} "
                raise ConfigError(f"{draft}: {what}another, such as {free_port()}")
            host_address(HOST, sorted(new))
        except StartError as error:  # what has it may be on its way out
            sys.stderr.write(f"kyb: warning: {error}\n")
        except ConfigError as error:
            raise ConfigError(str(error).replace(str(draft), str(file))) from None


def _replace(file: Path, text: str) -> None:
    try:
        files.replace(file, text, durable=False, mode=file.stat().st_mode & 0o777)
    except OSError as error:
        raise CliError(f"{file}: {error.strerror}; nothing has changed") from None


def _documents(text: str) -> list[str]:
    """The YAML documents of a text, each as it is written, with the line above it that begins it."""
    return [part for part in re.split(r"^(?=---(?:\s|$))", text, flags=re.MULTILINE) if part]


def _names(document: str) -> set[tuple[str, str]]:
    """Namespace and name of the Pod of one document; empty for a List and for no Pod."""
    pod = yaml.safe_load(document)
    if not isinstance(pod, dict) or pod.get("kind") != "Pod":
        return set()
    return {(str(pod["metadata"].get("namespace", "default")), pod["metadata"]["name"])}
