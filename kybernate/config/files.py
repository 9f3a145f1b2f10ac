"""Reading configurations: one file, one file with several named ones, or a folder of files (a mounted ConfigMap)."""

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import ConfigDict, Field, create_model

from kybernate.config.checks import check
from kybernate.config.fields import Name
from kybernate.config.model import NodeConfig, PolicyConfig
from kybernate.config_errors import ConfigError, Document, Place, Strict, read_documents, refuse, suggest
from kybernate.policy import POLICIES, UNUSABLE
from kybernate.sizes import MOST_SECONDS

DEFAULT = "default"
"""The configuration of nodes that name none."""
MOST = {"seconds": MOST_SECONDS, "slos": 1000.0, "ratio": 1000.0, "weight": 1000.0, "power": 10.0}
"""By the last word of a policy's constant: the largest value; the least is 0. Others would make a rule never or always
hold."""
CONFIG_LABEL = "kyb.ai/config"
"""Node label that names the node's configuration."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """One configuration: its document, its data and its place there."""

    document: Document
    data: Any
    at: Place = ()


def load(path: Path | str, name: str | None = None) -> NodeConfig:
    """Read and check the configuration called ``name`` (empty or None: ``default``) of a file or a folder.

    The others of the same file are only checked as YAML: a mistake in another node's configuration must not stop this
    one. Raises ConfigError: one message with file, line, place, value and remedy.
    """
    entries = _entries(Path(path))
    wanted = name or DEFAULT
    if wanted not in entries:
        have = ", ".join(entries)
        if name:
            raise ConfigError(f"{path}: no configuration {name!r}; {suggest(name, entries)} (it has {have})")
        remedy = f"set the node label {CONFIG_LABEL} to one of {have}, or add one called {DEFAULT}"
        raise ConfigError(f"{path}: has no configuration {DEFAULT!r} for nodes that name none; {remedy}")
    note = ""
    if not name and len(entries) > 1:
        others = ", ".join(each for each in entries if each != DEFAULT)
        note = f"this node names no configuration, so it gets {DEFAULT}; {CONFIG_LABEL} could name {others}"
    return _read(entries[wanted], wanted, note)


def names(path: Path | str) -> tuple[str, ...]:
    """Return the configurations' names; ``default`` alone for a file without names. Raises ConfigError."""
    return tuple(_entries(Path(path)))


def load_all(path: Path | str) -> dict[str, NodeConfig]:
    """Read and check all configurations of a file or a folder, by name. Raises ConfigError about all that are wrong."""
    found, errors = dict[str, NodeConfig](), list[ConfigError]()
    for name, entry in _entries(Path(path)).items():
        try:
            found[name] = _read(entry, name, "")
        except ConfigError as error:
            errors.append(error)
    refuse(errors)
    return found


def _entries(path: Path) -> dict[str, _Entry]:
    if not path.is_dir():
        return _in_file(path)
    # Kubernetes mounts a ConfigMap as links into a hidden folder; names that begin with a dot are not configurations.
    files = sorted(file for file in path.iterdir() if not file.name.startswith(".") and file.is_file())
    files = [file for file in files if file.suffix in ("", ".yaml", ".yml")]
    if not files:
        raise ConfigError(f"{path}: a folder without configurations; put NAME.yaml there, one file per configuration")
    if len(files) == 1 and isinstance(_document(files[0]).data, dict) and "configs" in _document(files[0]).data:
        return _in_file(files[0])
    found: dict[str, _Entry] = {}
    for file in files:
        document = _document(file)
        if isinstance(document.data, dict) and "configs" in document.data:
            what = "a folder of several files has one configuration in each"
            raise document.source.error(("configs",), None, what, "make each of these a separate file")
        if file.stem in found:
            raise ConfigError(f"{file}: a second configuration called {file.stem}; rename one of them")
        found[file.stem] = _Entry(document, document.data)
    return found


def _in_file(path: Path) -> dict[str, _Entry]:
    document = _document(path)
    if not isinstance(document.data, dict) or "configs" not in document.data:
        return {DEFAULT: _Entry(document, document.data)}
    configs = document.data["configs"]
    for key in document.data:
        if key != "configs":
            raise document.source.error((key,), None, "stands beside configs", "move it into one of the configurations")
    if not isinstance(configs, dict) or not configs:
        value = configs if isinstance(configs, (str, int, float)) else None
        raise document.source.error(("configs",), value, "is not a mapping", f"write {DEFAULT}: and others below it")
    for name in configs:
        document.validate(_Named, {"name": name}, ("configs", name))
    return {name: _Entry(document, data, ("configs", name)) for name, data in configs.items()}


def _document(path: Path) -> Document:
    documents = read_documents(path)
    if len(documents) > 1:
        raise documents[1].source.error((), None, "a second YAML document", "keep one document in this file")
    return documents[0]


def _read(entry: _Entry, name: str, note: str) -> NodeConfig:
    document, data, at = entry.document, entry.data, entry.at
    if not isinstance(data, dict):
        raise document.source.error(at, None, "is not a mapping", "begin with profiles: and gpuTopology:")
    errors = []
    policy, config = PolicyConfig(), None
    try:
        config = document.validate(NodeConfig, {key: value for key, value in data.items() if key != "policy"}, at)
    except ConfigError as error:
        errors.append(error)
    if data.get("policy") is not None:
        try:
            policy = _policy(document, data["policy"], (*at, "policy"))
        except ConfigError as error:
            errors.append(error)
    if config is not None:
        config.read_from(document.source, at, name, note)
        errors += check(config)
    refuse(errors)
    assert config is not None
    return config.model_copy(update={"policy": policy})


def _policy(document: Document, data: object, at: Place) -> PolicyConfig:
    """A name, and below ``settings`` constants that must be fields of that policy's dataclass."""
    if not isinstance(data, Mapping):
        meant = data if isinstance(data, str) and data in POLICIES else PolicyConfig.name
        raise document.source.error(at, data, "is not a mapping", f"write name: {meant} below it")
    given = document.validate(_Policy, {key: data[key] for key in ("name", "settings") if key in data}, at)
    name = given.name
    if name in UNUSABLE:
        what, _, remedy = UNUSABLE[name].rpartition("; ")
        raise document.source.error((*at, "name"), name, what, remedy)
    if name not in POLICIES:
        raise document.source.error((*at, "name"), name, "no such policy", suggest(name, POLICIES))
    constants = constants_of(name)
    for key in data:
        if key not in ("name", "settings"):
            keys = {field.alias: f"write it below settings: in {at[-1]}" for field in constants.model_fields.values()}
            remedy = keys.get(str(key), suggest(str(key), ("name", "settings")))
            raise document.source.error((*at, key), None, "unknown key", remedy)
    settings = document.validate(constants, given.settings, (*at, "settings"))
    return PolicyConfig(name, settings.model_dump(exclude_unset=True))


def constants_of(policy: str) -> type[Strict]:
    """Return a model of the constants of a policy, each within its range."""
    kind = cast(Any, POLICIES[policy])
    hints, fields = typing.get_type_hints(kind), dict[str, Any]()
    for field in dataclasses.fields(kind):
        most = MOST.get(field.name.rpartition("_")[2])
        fields[field.name] = (hints[field.name], field.default if most is None else Field(field.default, ge=0, le=most))
    return create_model(f"{policy} constants", __base__=_Constants, **fields)


class _Constants(Strict):
    model_config = ConfigDict(protected_namespaces=())


class _Named(Strict):
    name: Name


class _Policy(Strict):
    name: str = PolicyConfig.name
    settings: dict[str, Any] = Field(default_factory=dict)
