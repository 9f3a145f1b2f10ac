"""A Deployment becomes a seat: engines recognised by image and arguments, and the changes that each needs. Pure."""

import copy
import itertools
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kybernate import run
from kybernate.annotations import BACKEND, ENGINE_KEY, MODEL, PORT, PREFIX, VENDOR, chosen_devices, whole_gpus
from kybernate.engines import RESTART

RUN = f"{run.FOLDER}/{run.PROGRAM}"
KUBELET = "its crashLoopBackOff.maxContainerRestartPeriod: 2s bounds that"
GPU = f"{VENDOR}gpu"
ENGINE_LABEL = "kyb.ai/engine"
WORKLOADS = ("Deployment", "StatefulSet")
_REFERENCE = re.compile(r"\$(?:\$|\(([^)]+)\))")
"""``$(A)``, and ``$$`` for a dollar sign."""
_SHELL = re.compile(r"(.*/)?(ba|da|a|k|z)?sh")
_KEYS = {"VLLM_API_KEY", "LLAMA_API_KEY"}
_PROBES = ("startupProbe", "livenessProbe", "readinessProbe")

Json = dict[str, Any]
Path = tuple[str | int, ...]


class OnboardError(Exception):
    """A manifest cannot become a seat; the text names the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What a kind of engine needs."""

    name: str
    images: str
    """Pattern of its images."""
    commands: str
    """Pattern of its command line."""
    port: int
    backend: str
    health: str = "/health"
    model: tuple[str, ...] = ("--model",)
    """Options that name the model, the name that clients use first."""
    verb: str = ""
    """The word before a model without option."""
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    expect: tuple[str, ...] = ()
    entrypoints: Mapping[str, str] = field(default_factory=dict)
    """Pattern of an image → its entrypoint, which the arguments of a manifest without a command go to."""


KINDS = {
    "InferenceService": "KServe makes its pods: write the seat into spec.predictor (docs/dev/backends.md)",
    "LLMInferenceService": "KServe makes its pods: write the seat into spec.template (docs/dev/backends.md)",
    "LeaderWorkerSet": "several pods are one engine, which no seat holds: use one pod with several GPUs",
}
"""What is neither a Deployment nor a StatefulSet, and what to do."""
CONNECTORS = "a KV connector keeps the engine's memory registered with other engines, and a park unmaps it"
PREFILL = "an engine that only prefills, or only decodes, answers no client alone"
ENGINES = (
    Engine(
        "vLLM",
        r"(^|/)vllm",
        r"\bvllm\b",
        8000,
        "vllm",
        model=("--served-model-name", "--model"),
        verb="serve",
        flags=("--enable-sleep-mode",),
        env={"VLLM_SERVER_DEV_MODE": "1"},
        expect=(
            "vLLM sleeps (level 1): a copy of its weights stays in the pod's memory, of up to twice their size",
            "1 to 4 GiB of VRAM stay in use per GPU: lower --gpu-memory-utilization by as much",
            "dev mode opens endpoints that run code, and --api-key does not protect them: keep the NetworkPolicy on",
        ),
    ),
    Engine(
        "SGLang",
        r"(^|/)sglang",
        r"\bsglang\b",
        30000,
        "sglang",
        model=("--served-model-name", "--model-path", "--model"),
        flags=("--enable-memory-saver", "--enable-weights-cpu-backup", "--enable-metrics"),
        env={"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"},
        expect=(
            "SGLang releases its memory: a copy of its weights is kept in the pod's memory while it is parked",
            "1 to 3 GiB of VRAM stay in use per GPU: lower --mem-fraction-static by as much",
        ),
    ),
    Engine(
        "Ollama",
        r"(^|/)ollama",
        r"\bollama\b",
        11434,
        "unload",
        health="/",
        env={"OLLAMA_KEEP_ALIVE": "-1", "OLLAMA_MAX_LOADED_MODELS": "1"},
        expect=(
            "Ollama unloads the model: an activation reads it from the page cache, or from disk",
            "a request past the router loads the model again",
        ),
    ),
    Engine(
        "llama.cpp",
        r"(^|/)llama\.cpp|llama-server",
        r"\bllama-server\b",
        8080,
        "unload",
        model=("--alias", "-a"),
        flags=("--no-models-autoload", "--metrics"),
        expect=("llama.cpp's router unloads the model: an activation reads it from the page cache, or from disk",),
        entrypoints={r"ggml-org/llama\.cpp:server": "/app/llama-server"},
    ),
    Engine(
        "TensorRT-LLM",
        r"tensorrt-llm",
        r"\btrtllm-serve\b",
        8000,
        "restart",
        model=("--served-model-name", "--model"),
        verb="trtllm-serve",
        expect=("a park ends the engine, an activation starts it again",),
        entrypoints={r"nvidia/tensorrt-llm/release": "/opt/nvidia/nvidia_entrypoint.sh"},
    ),
    Engine(
        "TGI",
        r"text-generation-inference",
        r"\btext-generation-launcher\b",
        80,
        "cuda",
        model=("--model-id",),
        expect=("TGI has no sleep: the driver's checkpoint copies all of its VRAM to the pod's memory",),
    ),
)


@dataclass(frozen=True, slots=True)
class Onboarding:
    """A Deployment as a seat."""

    engine: str
    backend: str
    manifest: Json
    notes: tuple[str, ...]
    """What to expect, and what to look at."""


def onboard(manifest: Mapping[str, Any], model: str = "", resource: str = "") -> Onboarding:  # noqa: C901, PLR0912
    """The manifest as a seat. ``model``, ``resource``: in place of what it names itself. Raises OnboardError."""
    name = _name(manifest)
    try:
        template = manifest["spec"]["template"]
        containers = template["spec"]["containers"]
    except (KeyError, TypeError):
        raise OnboardError(f"{name} has no spec.template.spec.containers; give a whole manifest") from None
    index, engine = engine_of(name, containers)
    container, where = containers[index], ("spec", "template", "spec", "containers", index)
    if any(asked.startswith(PREFIX) for asked in (container.get("resources") or {}).get("limits") or {}):
        raise OnboardError(f"{name} is a seat already; kubectl rollout undo {name} leads back")
    line = _line(container)
    _refuse(name, template, container, engine, line)
    served = model or _model(engine, container)
    if not served:
        raise OnboardError(f"{name}: no argument names the model that {engine.name} serves; give --model NAME")
    if "$" in served:
        raise OnboardError(f"{name}: its model is {served}, whose value is not in the manifest; give --model NAME")
    count = gpus_of(container)
    if not count and not resource:
        raise OnboardError(
            f"{name}: container {container.get('name')} asks for no {GPU}; give --resource NAME of a seat"
        )
    resource = resource or f"{PREFIX}gpu-{count}x-seat"
    backend, notes = _backend(engine, line)
    given = _option(line, ("--port", "-p"))
    declared = list(container.get("ports") or ())
    port = given or (str(declared[0]["containerPort"]) if len(declared) == 1 else str(engine.port))
    if not port.isdecimal():
        raise OnboardError(f"{name}: its port is {port!r}; write a number, which the pod's annotation needs, too")
    draft = Draft(manifest)
    if manifest["kind"] == "Deployment":  # a StatefulSet ends a pod before it makes the next
        draft.put(("spec", "strategy"), {"type": "Recreate"})
    draft.put(("spec", "template", "metadata", "labels", ENGINE_LABEL), "true")
    for key, value in ((MODEL, served), (PORT, port), (BACKEND, backend)):
        draft.put(("spec", "template", "metadata", "annotations", key), value)
    for part, asked in whole_gpus(container):
        draft.put((*where, "resources", part, asked), None)
    draft.put((*where, "resources", "limits", resource), "1")
    if chosen := dict(chosen_devices(container)):
        kept = [one for one in container["env"] if one.get("name") not in chosen.values()]
        draft.put((*where, "env"), kept or None)
        notes.append(f"{' and '.join(chosen.values())} removed: the seat sets it, and the pod's own value would win")
    if backend == engine.backend:
        _switches(draft, where, container, engine)
    if backend == RESTART:
        notes.append(_runs(draft, where, container, engine))
    for probe in _PROBES:
        if "exec" in (container.get(probe) or {}):
            after = {key: value for key, value in container[probe].items() if key != "exec"}
            draft.put((*where, probe), after | {"httpGet": {"path": engine.health, "port": int(port)}})
            notes.append(f"{probe}: an exec probe cannot run in a parked engine, HTTP can")
        path = str(((container.get(probe) or {}).get("httpGet") or {}).get("path"))
        if path.partition("?")[0] == "/health_generate":
            draft.put((*where, probe, "httpGet", "path"), engine.health)
            notes.append(f"{probe}: /health_generate computes, which ends an engine that sleeps")
    if not any(probe in container for probe in _PROBES):
        http = {"path": engine.health, "port": int(port)}
        twenty_minutes = {"periodSeconds": 5, "failureThreshold": 240}  # to load the model
        draft.put((*where, "startupProbe"), {"httpGet": http, **twenty_minutes})
    if others := [word for word in _values(line, engine.model[0]) if word != served]:
        notes.append(f"clients find it as {served} only, and no longer as {', '.join(others)}")
    if "--api-key" in line or _KEYS & {one.get("name") for one in container.get("env") or ()}:
        notes.append(
            f"its API key: without {ENGINE_KEY} its answers are not compared after a park: docs/dev/backends.md"
        )
    notes.append("clients ask the router; a request past it, by the engine's Service, hangs while parked: kyb adopt")
    if "livenessProbe" in container:
        notes.append("livenessProbe: needs the webhook, whose kyb-probe answers for a parked engine; else remove it")
    if not ((container.get("resources") or {}).get("limits") or {}).get("memory"):
        notes.append("no memory limit: set one that holds the parked copy, 1.1 × the VRAM for backend cuda")
    return Onboarding(engine.name, backend, draft.manifest, (*notes,))


class Draft:
    """A copy of a manifest, to be changed."""

    def __init__(self, manifest: Mapping[str, Any]) -> None:
        self.manifest: Json = copy.deepcopy(dict(manifest))

    def get(self, path: Path) -> Any:
        """The value at a place; None: absent."""
        here: Any = self.manifest
        for part in path:
            if isinstance(part, int):
                here = here[part] if isinstance(here, list) and part < len(here) else None
            else:
                here = here.get(part) if isinstance(here, dict) else None
        return here

    def put(self, path: Path, value: Any) -> None:
        """Set a value, or remove it (None). Mappings on the way are made, and removed once they are empty."""
        if self.get(path) == value:
            return
        *way, last = path
        parent: Any = self.manifest
        for part in way:
            if isinstance(parent, dict) and parent.get(part) is None:  # absent, or an empty key of YAML
                parent[part] = {}
            parent = parent[part]
        if value is not None:
            parent[last] = copy.deepcopy(value)
            return
        del parent[last]
        if not parent and way:
            self.put(tuple(way), None)


def _name(manifest: Mapping[str, Any]) -> str:
    kind, name = manifest.get("kind"), (manifest.get("metadata") or {}).get("name")
    if remedy := KINDS.get(str(kind)):
        raise OnboardError(f"{kind} {name}: {remedy}")
    if kind not in WORKLOADS or not name:
        raise OnboardError(f"kind {kind!r}, name {name!r}: is no {' or '.join(WORKLOADS)} with a name; give one")
    return f"{'deploy' if kind == 'Deployment' else 'statefulset'}/{name}"


def _refuse(
    name: str, template: Mapping[str, Any], container: Mapping[str, Any], engine: Engine, line: Sequence[str]
) -> None:
    """Raise OnboardError about an engine that cannot be parked, or whose command line is a shell's script."""
    words = [str(word) for part in ("command", "args") for word in container.get(part) or ()]
    role = ((template.get("metadata") or {}).get("labels") or {}).get("llm-d.ai/role", "")
    if role in ("prefill", "decode") or "--disaggregation-mode" in line:
        raise OnboardError(f"{name}: {PREFILL}; leave it on whole GPUs")
    if "--kv-transfer-config" in line:
        connector = re.search(r'"kv_connector"\s*:\s*"([^"]+)"', _option(line, ("--kv-transfer-config",)))
        which = f" ({connector[1]})" if connector else ""
        raise OnboardError(f"{name}: {CONNECTORS}{which}; leave it on whole GPUs, or remove --kv-transfer-config")
    if not words or not _SHELL.fullmatch(words[0]):
        return
    try:
        script = shlex.split(words[-1].replace("\\\n", " "), comments=True)
    except ValueError:
        script = []
    if len(words) == 3 and script and not re.search(r"[;|&<>$`()*\n]", words[-1].replace("\\\n", " ").strip()):
        text = f"write {engine.name}'s words as a list, and try again:\n    command: {json.dumps(script)}\n    args: []"
    else:
        env = [f"{key}={value}" for key, value in engine.env.items()]
        needs = ", ".join((*engine.flags, *env)) or "nothing"
        text = f"write {engine.name}'s words as a list without a shell, or the seat by hand (it needs {needs})"
    raise OnboardError(f"{name}: its command is a shell's script, which is not changed here; {text}")


def engine_of(name: str, containers: Sequence[Mapping[str, Any]]) -> tuple[int, Engine]:
    """The first container of a known engine, by image or command line. Raises OnboardError."""
    for index, container in enumerate(containers):
        image, line = str(container.get("image", "")).lower(), " ".join(_line(container))
        for engine in ENGINES:
            if re.search(engine.commands, line) or (re.search(engine.images, image)):
                return index, engine
    known = ", ".join(engine.name for engine in ENGINES)
    raise OnboardError(f"{name}: no container is one of {known}, by image or command; write the seat by hand")


def _line(container: Mapping[str, Any]) -> list[str]:
    """The words of its command line as its engine gets them, ``--a_b=c`` as ``--a-b c``."""
    environment = _environment(container)
    given = [expand(str(word), environment) for part in ("command", "args") for word in container.get(part) or ()]
    split = [word.split("=", 1) if word.startswith("-") else [word] for word in given]
    pieces = itertools.chain.from_iterable(split)
    return [piece.replace("_", "-") if piece.startswith("--") else piece for piece in pieces]


def _environment(container: Mapping[str, Any]) -> dict[str, str | None]:
    """Its variables; None: the value is not in the manifest."""
    known: dict[str, str | None] = {}
    for one in container.get("env") or ():
        value = None if "valueFrom" in one else expand(str(one.get("value") or ""), known)
        known[str(one.get("name"))] = value
    return known


def expand(text: str, known: Mapping[str, str | None]) -> str:
    """As kubelet replaces ``$(A)``; what is not known stays, ``$$`` is a dollar sign."""

    def value(found: re.Match[str]) -> str:
        here = known.get(found[1]) if found[1] else "$"
        return found[0] if here is None else here

    return _REFERENCE.sub(value, text)


def _option(line: Sequence[str], names: Iterable[str]) -> str:
    for name in names:
        if name in line[:-1]:
            return line[line.index(name) + 1]
    return ""


def _values(line: Sequence[str], option: str) -> list[str]:
    """All words behind an option that takes several."""
    behind = line[line.index(option) + 1 :] if option in line else ()
    return list(itertools.takewhile(lambda word: not word.startswith("-"), behind))


def _model(engine: Engine, container: Mapping[str, Any]) -> str:
    line = _line(container)
    given = _option(line, (engine.verb,)) if engine.verb else ""
    if given == "serve":  # trtllm-serve serve MODEL
        given = _option(line, ("serve",))
    if engine.verb and not container.get("command") and line:  # the image's own command is the verb
        given = given or line[0]
    positional = "" if given.startswith("-") else given
    first, *rest = engine.model
    return _option(line, (first,)) or positional or _option(line, rest)


def gpus_of(container: Mapping[str, Any]) -> int:
    """Whole GPUs that it asks for."""
    resources = container.get("resources") or {}
    asked = [int((resources.get(part) or {}).get(GPU, 0)) for part in ("limits", "requests")]
    return max(asked)


def _backend(engine: Engine, line: Sequence[str]) -> tuple[str, list[str]]:
    """How it is parked, and what to expect."""
    if engine.name == "llama.cpp" and {"-m", "--model", "-hf", "--hf-repo"} & {*line}:
        return "restart", ["one model without router mode cannot be unloaded: a park ends the engine"]
    offloads = {"--kv-offloading-size", "--kv-offloading-backend"} & {*line}
    if engine.name == "vLLM" and offloads and "lmcache" not in line:
        return "restart", ["native KV offload and sleep end vLLM's engine: a park ends it, too"]
    notes = list(engine.expect)
    if engine.name == "vLLM" and "--enable-lora" in line:
        notes.append(
            "--enable-lora: answers after a sleep have been wrong in some versions; keep the check of answers on"
        )
    return engine.backend, notes


def _switches(draft: Draft, where: Path, container: Mapping[str, Any], engine: Engine) -> None:
    """Flags and variables that its sleep needs."""
    missing = [flag for flag in engine.flags if flag not in _line(container)]
    if missing:
        part = "args" if container.get("args") or not container.get("command") else "command"
        draft.put((*where, part), [*(container.get(part) or ()), *missing])
    env = [one for one in draft.get((*where, "env")) or () if one.get("name") not in engine.env]
    if engine.env:
        draft.put((*where, "env"), [*env, *({"name": name, "value": value} for name, value in engine.env.items())])


def _runs(draft: Draft, where: Path, container: Mapping[str, Any], engine: Engine) -> str:
    """Put kyb-run in front of its command, and say what follows; of an image whose entrypoint is not known, what to
    write."""
    image = str(container.get("image", "")).lower()
    known = next((file for images, file in engine.entrypoints.items() if re.search(images, image)), "")
    program = list(container.get("command") or ([known] if known and container.get("args") else ()))
    if not program:
        return (
            f"the entrypoint of {image or 'its image'} is not known: write it behind command: [{RUN}, --, …], else a "
            f"park ends the container, and kubelet starts it again later each time ({KUBELET})"
        )
    if program[0] != RUN:
        draft.put((*where, "command"), [RUN, "--", *program])
    return f"{RUN}, from its node, starts the engine again: the pod stays Ready, and kubelet counts no restart"
