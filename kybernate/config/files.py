"""Reading configurations: one file, or a folder of files, called by their names (a mounted ConfigMap)."""

import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from pydantic import ConfigDict, Field, create_model

from kybernate.config.checks import check
from kybernate.config.model import NodeConfig, PolicyConfig
from kybernate.config_errors import ConfigError, Document, Strict, read_documents, refuse, suggest
from kybernate.policy import POLICIES, UNUSABLE
from kybernate.sizes import MOST_SECONDS

DEFAULT = "default"
"""The configuration of nodes that name none."""
MOST = {"seconds": MOST_SECONDS, "slos": 1000.0, "ratio": 1000.0, "weight": 1000.0, "power": 10.0}
"""By the last word of a policy's constant: the largest value; the least is 0. Others would make a rule never or always
hold."""
CONFIG_LABEL = "kyb.ai/config"
"""Node label that names the node's configuration."""


def load(path: Path | str, name: str | None = None) -> NodeConfig:
    """Read and check the configuration called ``name`` (empty or None: ``default``) of a file or a folder.

    The others of the same folder are only checked as YAML: a mistake in another node's configuration must not stop this
    one. Raises ConfigError: one message with file, line, place, value and remedy.
    """
    documents = _documents(Path(path))
    wanted = name or DEFAULT
    if wanted not in documents:
        have = ", ".join(documents)
        if name:
            raise ConfigError(f"{path}: no configuration {name!r}; {suggest(name, documents)} (it has {have})")
        remedy = f"set the node label {CONFIG_LABEL} to one of {have}, or add one called {DEFAULT}"
        raise ConfigError(f"{path}: has no configuration {DEFAULT!r} for nodes that name none; {remedy}")
    note = ""
    if not name and len(documents) > 1:
        others = ", ".join(each for each in documents if each != DEFAULT)
        note = f"this node names no configuration, so it gets {DEFAULT}; {CONFIG_LABEL} could name {others}"
    return _read(documents[wanted], wanted, note)


def names(path: Path | str) -> tuple[str, ...]:
    """Return the configurations' names; ``default`` alone for a file. Raises ConfigError."""
    return tuple(_documents(Path(path)))


def load_all(path: Path | str) -> dict[str, NodeConfig]:
    """Read and check all configurations of a file or a folder, by name. Raises ConfigError about all that are wrong."""
    found, errors = dict[str, NodeConfig](), list[ConfigError]()
    for name, document in _documents(Path(path)).items():
        try:
            found[name] = _read(document, name, "")
        except ConfigError as error:
            errors.append(error)
    refuse(errors)
    return found


def _documents(path: Path) -> dict[str, Document]:
    if not path.is_dir():
        return {DEFAULT: _document(path)}
    # Kubernetes mounts a ConfigMap as links into a hidden folder; names that begin with a dot are not configurations.
    files = sorted(file for file in path.iterdir() if not file.name.startswith(".") and file.is_file())
    files = [file for file in files if file.suffix in ("", ".yaml", ".yml")]
    if not files:
        raise ConfigError(f"{path}: a folder without configurations; put NAME.yaml there, one file per configuration")
    found: dict[str, Document] = {}
    for file in files:
        if file.stem in found:
            raise ConfigError(f"{file}: a second configuration called {file.stem}; rename one of them")
        found[file.stem] = _document(file)
    return found


def _document(path: Path) -> Document:
    documents = read_documents(path)
    if len(documents) > 1:
        raise documents[1].source.error((), None, "a second YAML document", "keep one document in this file")
    return documents[0]


def _read(document: Document, name: str, note: str) -> NodeConfig:
    data = document.data
    if not isinstance(data, dict):
        raise document.source.error((), None, "is not a mapping", "begin with profiles: and gpuTopology:")
    if "configs" in data:  # of several nodes, in releases before
        raise document.source.error(("configs",), None, "unknown key", "write each to NAME.yaml of a folder")
    errors = []
    policy, config = PolicyConfig(), None
    try:
        config = document.validate(NodeConfig, {key: value for key, value in data.items() if key != "policy"})
    except ConfigError as error:
        errors.append(error)
    if data.get("policy") is not None:
        try:
            policy = _policy(document, data["policy"])
        except ConfigError as error:
            errors.append(error)
    if config is not None:
        config.read_from(document.source, name, note)
        errors += check(config)
    refuse(errors)
    assert config is not None
    return config.model_copy(update={"policy": policy})


def _policy(document: Document, data: object) -> PolicyConfig:
    """A name, and below ``settings`` constants that must be fields of that policy's dataclass."""
    if not isinstance(data, Mapping):
        meant = data if isinstance(data, str) and data in POLICIES else PolicyConfig.name
        raise document.source.error(("policy",), data, "is not a mapping", f"write name: {meant} below it")
    given = document.validate(_Policy, {key: data[key] for key in ("name", "settings") if key in data}, ("policy",))
    name = given.name
    if name in UNUSABLE:
        what, _, remedy = UNUSABLE[name].rpartition("; ")
        raise document.source.error(("policy", "name"), name, what, remedy)
    if name not in POLICIES:
        raise document.source.error(("policy", "name"), name, "no such policy", suggest(name, POLICIES))
    constants = constants_of(name)
    for key in data:
        if key not in ("name", "settings"):
            keys = {field.alias: "write it below settings: in policy" for field in constants.model_fields.values()}
            remedy = keys.get(str(key), suggest(str(key), ("name", "settings")))
            raise document.source.error(("policy", key), None, "unknown key", remedy)
    settings = document.validate(constants, given.settings, ("policy", "settings"))
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


class _Policy(Strict):
    name: str = PolicyConfig.name
    settings: dict[str, Any] = Field(default_factory=dict)
