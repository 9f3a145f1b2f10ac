"""Reading a call's arguments; what is wrong is answered with INVALID_VALUE and a text. Pure."""

from collections.abc import Iterable
from typing import Any

from kybernate.dev.fakes.gpu.codes import Code
from kybernate.dev.fakes.gpu.process import RefusedError


def integer(arguments: dict[str, Any], name: str, default: int | None = None) -> int:
    """An argument that is a number of at least 0."""
    value = arguments.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise RefusedError(Code.INVALID_VALUE, f"{name}={value!r}; give a whole number of at least 0")
    return value


def text(arguments: dict[str, Any], name: str, default: str | None = None) -> str:
    """An argument that is a text and not empty."""
    value = arguments.get(name) or default
    if not isinstance(value, str):
        raise RefusedError(Code.INVALID_VALUE, f"{name}={value!r}; give a text")
    return value


def texts(arguments: dict[str, Any], name: str) -> list[str]:
    """An argument that is a list of texts."""
    value = arguments.get(name)
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise RefusedError(Code.INVALID_VALUE, f"{name}={value!r}; give a list of texts")
    return value


def gpu_permutation(arguments: dict[str, Any], gpus: Iterable[str]) -> dict[str, str]:
    """The ``gpu_map`` of a restore. As on real drivers it must name every GPU of the machine once on each side."""
    everyone = sorted(gpus)
    moves = arguments.get("gpu_map")
    if moves is None:
        return dict(zip(everyone, everyone, strict=True))
    if not isinstance(moves, dict) or sorted(moves) != everyone or sorted(map(str, moves.values())) != everyone:
        raise RefusedError(Code.INVALID_VALUE, f"gpu_map must be a permutation of all GPUs: {', '.join(everyone)}")
    return moves
