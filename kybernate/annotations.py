"""Annotations of pods: their names, their values parsed once, and what is wrong with those that cannot be used. Pure.

``docs/config.md`` has the table for users.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kybernate.config import STANDARD, NodeConfig
from kybernate.config_errors import suggest
from kybernate.engines import BACKENDS
from kybernate.envelope import LONGEST_NAME
from kybernate.sizes import MOST_SECONDS, parse_seconds, parse_size

PREFIX = "kyb.ai/"
VENDOR = "nvidia.com/"
"""Of the resources that a seat replaces: whole GPUs, shared ones and MIG instances."""
BACKEND = "kyb.ai/backend"
ENGINE_KEY = "kyb.ai/engine-key"
MAX_REQUESTS = "kyb.ai/max-requests"
MODEL = "kyb.ai/model"
PIN = "kyb.ai/pin"
PORT = "kyb.ai/port"
PREFER_GROUP = "kyb.ai/prefer-group"
PROBE_PORT = "kyb.ai/probe-port"
REBALANCE = "kyb.ai/rebalance"
SLO = "kyb.ai/slo"
TIER = "kyb.ai/tier"
VERIFY = "kyb.ai/verify"
VRAM = "kyb.ai/vram"

UNSUPPORTED = {
    "kyb.ai/gang": "a model on several groups is one seat of a group that spans them (docs/dev/topology.md); remove it",
    "kyb.ai/stall-budget": "remove it: requests in flight end before their seat is parked",
    "kyb.ai/priority": f"write {TIER}: the weight of its tier orders seats",
}
"""Names that earlier versions accepted without effect: what to write instead."""


@dataclass(frozen=True, slots=True)
class AnnotationProblem:
    """An annotation that cannot be used; a running pod counts as if it did not have it."""

    name: str
    value: str | None
    """None: the name itself is wrong."""
    what: str
    remedy: str

    def text(self, pod: str = "") -> str:
        """The problem as one sentence; ``pod`` is ``namespace/name`` where the reader does not know it."""
        value = "" if self.value is None else f": {self.value[:LONGEST_NAME]!r}"
        name = self.name if self.name.isprintable() else repr(self.name)
        return f"{name}{value}{f' of pod {pod}' if pod else ''} {self.what}; {self.remedy}"


@dataclass(frozen=True, slots=True)
class SeatAnnotations:
    """What the annotations of a pod with a seat ask for."""

    backend: str = "cuda"
    """How it is parked."""
    engine_key: str = ""
    """Name of the key that its engine requires; empty: none."""
    max_requests: int = 0
    """Requests that the engine serves at once; 0: learned by the routers."""
    model: str = ""
    """The model that clients request; empty: the pod's name."""
    pin: bool = False
    """Never parked."""
    port: int = 8000
    """Where the engine listens."""
    prefer_group: str = ""
    """``group`` or ``node/group``; empty: any."""
    probe_port: int | None = None
    """First port of kyb-probe; None: the webhook's setting."""
    rebalance: bool = True
    """May be activated on another group of its profile."""
    slo_seconds: float | None = None
    """Model seconds; None: its tier's."""
    tier: str = STANDARD
    verify: bool = True
    """Compare its models' answers before it serves again."""
    vram_bytes: int | None = None
    """Footprint when active, over all its GPUs; None: not declared."""
    problems: tuple[AnnotationProblem, ...] = ()


def parse(annotations: Mapping[str, str]) -> SeatAnnotations:
    """Read the annotations of a pod. A value that cannot be used is left at its default and listed in ``problems``."""
    fields: dict[str, Any] = {}
    problems = []
    for name, text in annotations.items():
        if not name.startswith(PREFIX):
            domain, _, word = name.lower().rpartition("/")
            if "kyb" in domain and PREFIX + word in PARSERS:  # kybernate.ai/port: no other software reads that
                remedy = f"did you mean {PREFIX}{word}?"
                problems.append(AnnotationProblem(name, None, "is not a known annotation", remedy))
            continue
        if name not in PARSERS:
            remedy = UNSUPPORTED.get(name) or suggest(name, PARSERS)
            problems.append(AnnotationProblem(name, None, "is not a known annotation", remedy))
            continue
        field, read, what, remedy = PARSERS[name]
        try:
            fields[field] = read(text)
        except ValueError:
            problems.append(AnnotationProblem(name, text, what, remedy))
    return SeatAnnotations(**fields, problems=tuple(problems))


def tier_problem(tier: str, known: Iterable[str]) -> AnnotationProblem | None:
    """Return the problem with a tier that the node's configuration does not have; None if it has it."""
    known = tuple(known)
    if tier in known:
        return None
    remedy = f"{suggest(tier, known)}, or add it below tiers: in the configuration"
    return AnnotationProblem(TIER, tier, "is not a tier", remedy)


def group_problem(wanted: str, resource: str, configs: Iterable[NodeConfig]) -> AnnotationProblem | None:
    """Return the problem with a preferred group; None if a seat of this resource can be on it.

    Where no group of its size is listed, nodes discover them, and any name is accepted.
    """
    names: set[str] = set()
    for config in configs:
        for profile in config.profiles:
            if profile.resource == resource:
                listed = [group.name for group in config.gpu_topology.groups if len(group.gpus) == profile.group_size]
                if not listed:
                    return None
                names.update(listed)
    group = wanted.rpartition("/")[2]
    if not wanted or group in names:
        return None
    return AnnotationProblem(PREFER_GROUP, wanted, f"is no group of {resource}", suggest(group, names))


def _number(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
            raise ValueError
        return int(text)

    return read


def _that(fits: Callable[[str], object]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if not fits(text):
            raise ValueError
        return text

    return read


_word = _that(lambda text: text.strip() == text != "" and text.isprintable() and len(text) <= LONGEST_NAME)


def _slo(text: str) -> float:
    if text[-1:].isdigit():  # 20 may be meant as milliseconds or minutes
        raise ValueError
    if not 0 < (seconds := parse_seconds(text)) <= MOST_SECONDS:
        raise ValueError
    return seconds


def _vram(text: str) -> int:
    if (size := parse_size(text)) < 2**20:
        raise ValueError
    return size


def _one_of(words: Mapping[str, bool]) -> Callable[[str], bool]:
    def read(text: str) -> bool:
        if text.lower() not in words:
            raise ValueError
        return words[text.lower()]

    return read


_FLAG = _one_of({"true": True, "false": False}), "is neither true nor false", 'write "true" or "false"'
_IN_SECONDS = 'write seconds, such as "20s" or "500ms", at most a day'
PARSERS: Mapping[str, tuple[str, Callable[[str], object], str, str]] = {
    BACKEND: (
        "backend",
        _that(BACKENDS.__contains__),
        "is not a way of parking",
        f"write one of {', '.join(BACKENDS)}",
    ),
    ENGINE_KEY: (
        "engine_key",
        _that(re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*").fullmatch),
        "is not the name of a key",
        "write NAME of the file NAMESPACE.NAME in KYB_ENGINE_KEYS_DIR",
    ),
    MAX_REQUESTS: (
        "max_requests",
        _number(1, 1_000_000),
        "is not a number of requests",
        'write a number, such as "256"',
    ),
    MODEL: (
        "model",
        _word,
        "is no name",
        f"write the name that clients request, printable and at most {LONGEST_NAME} characters; without it "
        "the pod's name counts",
    ),
    PIN: ("pin", *_FLAG),
    PORT: ("port", _number(1, 65535), "is not a port", "write a number from 1 to 65535"),
    PREFER_GROUP: ("prefer_group", _word, "is no name", "write a group, or node/group"),
    PROBE_PORT: ("probe_port", _number(1024, 65000), "is not a port", "write a number from 1024 to 65000"),
    REBALANCE: ("rebalance", *_FLAG),
    SLO: ("slo_seconds", _slo, "is not a duration above 0 with a unit", _IN_SECONDS),
    TIER: ("tier", _word, "is no name", "write a tier of the configuration"),
    VERIFY: ("verify", _one_of({"on": True, "off": False}), "is neither on nor off", 'write "on" or "off"'),
    VRAM: ("vram_bytes", _vram, "is not a size with a unit", 'write bytes with a unit: "40GiB"'),
}
"""By name: field, parser (ValueError: the value cannot be used), what is wrong then, what to write."""

NAMES = tuple(PARSERS)

_SLOTS_OPTION = re.compile(
    r"(?:^|\s)(?:--max[-_]num[-_]seqs|--max-running-requests|--max-concurrent-requests|--max_batch_size|--parallel|-np)"
    r"[=\s]+([1-9]\d{0,5})(?=\s|$)"
)
"""Of vLLM, which takes underscores, too, SGLang, TGI, TensorRT-LLM and llama.cpp."""
_SEVERAL = re.compile(r"(?:^|\s)(?:--data[-_]parallel[-_]size|--dp-size|--dp|-dp)[=\s]")
"""With data parallelism the option counts per rank, so that it does not tell the number of the engine."""


def with_options(
    own: Mapping[str, str], container: Mapping[str, Any]
) -> tuple[dict[str, str], tuple[AnnotationProblem, ...]]:
    """Return a pod's annotations and those that its container implies; its own count where they can be used. And the
    problems with those that do not count therefore."""
    implied = slots_option(container) | backend_option(container)
    replaced = tuple(problem for problem in parse(own).problems if problem.name in implied)
    wrong = {problem.name for problem in replaced}
    return implied | {name: value for name, value in own.items() if name not in wrong}, replaced


def slots_option(container: Mapping[str, Any]) -> dict[str, str]:
    """Return the annotation ``kyb.ai/max-requests`` that a container's command line implies; empty if there is none."""
    line = " ".join(str(word) for part in ("command", "args") for word in container.get(part) or ())
    found = [] if _SEVERAL.search(line) else _SLOTS_OPTION.findall(line)
    return {MAX_REQUESTS: found[-1]} if found else {}


def backend_option(container: Mapping[str, Any]) -> dict[str, str]:
    """Return the annotation ``kyb.ai/backend`` that a container's image, command line and environment imply: that of an
    engine which was started so that it can sleep or unload; empty for any other."""
    words = [str(word) for part in ("command", "args") for word in container.get(part) or ()]
    line = " ".join(words).split()  # a shell's line is one word
    options = {word.removesuffix("=true").replace("_", "-") for word in line}
    dev_mode = {"name": "VLLM_SERVER_DEV_MODE", "value": "1"} in (container.get("env") or ())
    if "--enable-sleep-mode" in options and (dev_mode or "VLLM_SERVER_DEV_MODE=1" in line):
        return {BACKEND: "vllm"}
    if {"--enable-memory-saver", "--enable-weights-cpu-backup"} <= options:
        return {BACKEND: "sglang"}
    image = re.split("[:@]", str(container.get("image", "")).rpartition("/")[2])[0]
    if image == "ollama" or re.search(r"(?:^|[\s/])ollama serve(?:\s|$)", " ".join(line)):
        return {BACKEND: "unload"}
    return {}


def chosen_devices(container: Mapping[str, Any]) -> Iterable[tuple[int, str]]:
    """(index, name) of each variable by which a container of a seat chooses GPUs itself. Kubelet puts a pod's variables
    after those of its seat, so that they win: the engine would run on another group's GPU."""
    for index, one in enumerate(container.get("env") or ()):
        if isinstance(one, Mapping) and one.get("name") in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
            yield index, str(one["name"])


def whole_gpus(container: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(limits or requests, resource) of each GPU that a container asks of NVIDIA's device plugin: not the seat's."""
    parts = {part: (container.get("resources") or {}).get(part) or {} for part in ("requests", "limits")}
    return [(part, name) for part, asked in parts.items() for name in asked if str(name).startswith(VENDOR)]


def misplaced(annotations: Mapping[str, Any], elsewhere: object) -> list[str]:
    """Annotations that have no effect, since they stand among labels or at what makes the pod, and not at the pod."""
    return [name for name in NAMES if isinstance(elsewhere, Mapping) and name in elsewhere and name not in annotations]
