"""What other packages add: the extra ``dev`` the fake GPU driver and what goes with it, yours policies and backends.

Production code never imports ``kybernate.dev``. The extra registers its parts as entry points of the group
``kybernate.dev`` in pyproject.toml, and the few places that accept a fake look them up here by name.
"""

import importlib.util
from collections.abc import Collection
from importlib import metadata
from typing import Any, Literal

GROUP = "kybernate.dev"

OpenGroup = Literal["kybernate.policies", "kybernate.backends"]
"""Groups of entry points to which any package may add."""

DevPart = Literal["gpus", "helper_driver", "host_memory", "driver_facts", "check_pods", "local_facts", "print_services"]


class ExtraMissingError(Exception):
    """The extra ``dev`` is asked for and not installed; the text names the setting or option, and the remedy."""


def dev_part(part: DevPart, asked_by: str) -> Any:
    """The object that the extra ``dev`` registered as ``part``. ``asked_by``: the setting or option, for the error.

    Raises ExtraMissingError.
    """
    return _entry(part, asked_by).load()


def dev_part_path(part: DevPart, asked_by: str) -> str:
    """Where ``dev_part`` finds it, ``module:attribute``, without importing it. Raises ExtraMissingError."""
    return _entry(part, asked_by).value


def names(group: OpenGroup, *, besides: Collection[str] = ()) -> tuple[str, ...]:
    """The names that installed packages registered in this group; nothing is imported."""
    return tuple(sorted({entry.name for entry in metadata.entry_points(group=group)} - {*besides}))


def registered(group: OpenGroup) -> tuple[dict[str, Any], dict[str, str]]:
    """What installed packages registered as entry points of this group, by name; and by name why what cannot be
    imported is left out: a package may raise anything, and stops only what asks for it."""
    found: dict[str, Any] = {}
    unusable: dict[str, str] = {}
    for entry in metadata.entry_points(group=group):
        try:
            found[entry.name] = entry.load()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also SystemExit
            package = entry.dist.name if entry.dist is not None else "?"
            what = f"{entry.value} cannot be imported: {type(error).__name__}: {' '.join(str(error).split())}"
            unusable[entry.name] = f"{what}; repair or uninstall package {package}"
    return found, {name: why for name, why in unusable.items() if name not in found}


def _entry(part: DevPart, asked_by: str) -> metadata.EntryPoint:
    found = metadata.entry_points(group=GROUP, name=part)
    if importlib.util.find_spec(GROUP) is None or not found:
        raise ExtraMissingError(
            f"{asked_by} needs the extra dev: pip install 'kybernate[dev]', or in a checkout: make setup "
            f"(no package {GROUP} with an entry point {part})"
        )
    return next(iter(found))
