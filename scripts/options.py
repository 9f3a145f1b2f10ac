"""Every option of the product, one a line in ``kybernate/config/options.json``: what ``kyb config explain`` shows and
``tests/test_options.py`` counts. Written and checked by ``generate.py``; as a program it prints the counts."""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a script's folder is on the path, the repository is not

from kybernate.cli.app import app  # noqa: E402
from kybernate.settings import Settings  # noqa: E402
from scripts.chart_schema import comments  # noqa: E402
from scripts.config_schema import annotations_schema  # noqa: E402
from scripts.config_schema import settings as config_keys  # noqa: E402
from scripts.field_docs import field_docs  # noqa: E402
from services.checkpointer.settings import CheckpointerSettings  # noqa: E402
from services.console.settings import ConsoleSettings  # noqa: E402
from services.gpu_manager.settings import ManagerSettings  # noqa: E402
from services.plugin.settings import PluginSettings  # noqa: E402
from services.router.settings import RouterSettings  # noqa: E402
from services.webhook.settings import WebhookSettings  # noqa: E402

PATH = "kybernate/config/options.json"
SERVICES: dict[str, type[Settings]] = {
    "plugin": PluginSettings,
    "manager": ManagerSettings,
    "checkpointer": CheckpointerSettings,
    "router": RouterSettings,
    "console": ConsoleSettings,
    "webhook": WebhookSettings,
}
UNITS = {"seconds": "s", "bytes": "bytes", "port": "port", "percentage": "%", "gib": "GiB", "window": "s"}
"""By the last word of a name."""


class Option(NamedTuple):
    """One option, as ``kyb config explain`` shows it."""

    kind: str
    """env, config, annotation, chart or cli."""
    name: str
    default: str
    unit: str
    text: str


def options() -> list[Option]:
    """Every option, by kind and in the order of its declaration."""
    return [*_environment(), *_config(), *_annotations(), *_chart(), *_command_line()]


def _environment() -> Iterator[Option]:
    found: dict[str, tuple[str, dict[str, list[str]]]] = {}
    for service, kind in SERVICES.items():
        texts = field_docs(kind)
        for name, info in kind.options().items():
            default = "host name" if info.default_factory else _text(info.get_default())
            services = found.setdefault(f"KYB_{name.upper()}", (default, {}))[1]
            services.setdefault(texts.get(name, ""), []).append(service)
    for name, (default, by_text) in found.items():
        every = [
            f"{text} ({'every service' if len(services) == len(SERVICES) else ', '.join(services)})"
            for text, services in by_text.items()
        ]
        yield Option("env", name, default, _unit(name, next(iter(by_text))), " ".join(every))


def _config() -> Iterator[Option]:
    every = list(config_keys())
    for key in every:
        if not any(other.path.startswith((f"{key.path}.", f"{key.path}[]")) for other in every):
            default = "required" if key.required else "" if key.default is None else json.dumps(key.default)
            yield Option("config", key.path, default, _unit(key.path, key.text), f"{key.text} ({key.kind})".lstrip())


def _annotations() -> Iterator[Option]:
    for name, given in annotations_schema()["properties"].items():
        yield Option("annotation", name, "", "", given["description"])


def _chart() -> Iterator[Option]:
    source = (ROOT / "helm" / "kybernate" / "values.yaml").read_text()
    texts = comments(source)
    for path, default in _leaves(yaml.safe_load(source), ""):
        text = next((texts[above] for above in _above(path) if above in texts), "")
        yield Option("chart", path, json.dumps(default), _unit(path, text), text)


def _command_line() -> Iterator[Option]:
    for command, each in _commands(typer.main.get_command(app), ("kyb",)):
        for option in each.params:
            if option.param_type_name == "option":
                default = "" if option.required or callable(option.default) else _text(option.default)
                name = f"{' '.join(command)} {max(option.opts, key=len)}"
                yield Option("cli", name, default, _unit(name, option.help or ""), option.help or "")


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from _commands(below, (*path, name))


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and value:
        for key, below in value.items():
            yield from _leaves(below, f"{path}.{key}".lstrip("."))
    else:
        yield path, value


def _above(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]


def _unit(name: str, text: str) -> str:
    last = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name.rpartition("--")[2] if "--" in name else name)[-1].lower()
    return UNITS.get(last) or next((word for word in ("model seconds", "seconds", "bytes") if word in text.lower()), "")


def _text(value: object) -> str:
    if value is None or value == "" or value == ():
        return ""
    return (
        value if isinstance(value, str) else str(value) if isinstance(value, Path) else json.dumps(value, default=str)
    )


def documents() -> dict[str, str]:
    """The file, by its path in the repository."""
    rows = [json.dumps(one._asdict()) for one in options()]
    return {PATH: "[\n" + ",\n".join(rows) + "\n]\n"}


if __name__ == "__main__":
    numbers = Counter(one.kind for one in options())
    print(*(f"{number:4} {kind}" for kind, number in numbers.items()), f"{sum(numbers.values()):4} in all", sep="\n")
