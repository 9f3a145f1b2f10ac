"""Types of single values of a configuration; each refusal has a remedy. Pure."""

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from kybernate.sizes import MOST_SECONDS, format_bytes, parse_size

Placement = Literal["first-fit", "best-fit", "worst-fit", "bin-pack", "spread", "topology-aware"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
LEAST_HOST_BYTES = 2**30
_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_DOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_UUID = re.compile(r"(GPU|MIG)-[A-Za-z0-9/-]+")
_MIG_PROFILE = re.compile(r"([1-7]c\.)?[1-7]g\.[1-9]\d{0,3}gb([+-][a-z.]+)*")


def _wrong(what: str, remedy: str) -> PydanticCustomError:
    return PydanticCustomError("kyb", cast(Any, what), {"remedy": remedy})


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise _wrong("is not text", "names are text; put it in quotes")
    if not _NAME.fullmatch(value):
        raise _wrong(
            "is not a valid name",
            "use 1 to 63 letters, digits, '-', '_' or '.', beginning and ending with a letter or digit",
        )
    return value


def _resource(value: object) -> str:
    domain, slash, name = value.partition("/") if isinstance(value, str) else ("", "", "")
    if value == "nvidia.com/gpu":
        raise _wrong("is what NVIDIA's device plugin advertises", "write another name, such as kyb.ai/gpu-1x-seat")
    good = slash and len(domain) <= 253 and _DOMAIN.fullmatch(domain) and _NAME.fullmatch(name)
    if not good or domain.startswith("requests.") or domain == "kubernetes.io" or domain.endswith(".kubernetes.io"):
        raise _wrong(
            "is not a valid extended resource name",
            "write domain/name outside of kubernetes.io, such as kyb.ai/gpu-1x-seat",
        )
    return cast(str, value)


def _gpu(value: object) -> int | str:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and _UUID.fullmatch(value):
        return value
    raise _wrong("is not a GPU", "name it by its index (0, 1, …) or by its UUID (GPU-…)")


def _mig_profile(value: object) -> str:
    if isinstance(value, str) and _MIG_PROFILE.fullmatch(value):
        return value
    raise _wrong("is not a MIG profile", "write it as nvidia-smi mig -lgip does, without MIG: 3g.40gb")


def _size(value: object) -> int:
    try:
        return parse_size(str(value))
    except ValueError:
        raise _wrong("is not a size with a unit", 'write bytes with a unit, up to 1024TiB: "1GiB"') from None


def _host_memory(value: object) -> int | str:
    """YAML reads a bare ``off`` as false."""
    word = "off" if value is False else value
    if word in ("off", "auto"):
        return word
    if (size := _size(word)) < LEAST_HOST_BYTES:
        raise _wrong("is too little for the copy of any model", f"write at least {format_bytes(LEAST_HOST_BYTES)}")
    return size


def _claim(value: object) -> str:
    kind, _, name = value.partition("/") if isinstance(value, str) else ("", "", "")
    if value != "pin" and (kind not in ("model", "tier") or not name):
        raise _wrong("is nothing that a namespace can have alone", "write model/NAME, tier/NAME or pin")
    return cast(str, value)


def _text(check: Callable[[object], Any], kind: Any = str) -> PlainValidator:
    """A check whose input is ``kind`` in the JSON schema."""
    return PlainValidator(check, json_schema_input_type=kind)


Name = Annotated[str, _text(_name)]
Resource = Annotated[str, _text(_resource)]
Claim = Annotated[str, _text(_claim)]
"""What a pod's annotations claim: ``model/NAME``, ``tier/NAME``, ``pin``."""
GpuName = Annotated[int | str, _text(_gpu, int | str)]
"""A host index or a UUID."""
MigProfile = Annotated[str, _text(_mig_profile)]
Size = Annotated[int, _text(_size, str)]
"""Bytes; written with a unit, e.g. ``1GiB``."""
HostMemory = Annotated[int | str, _text(_host_memory, bool | str)]
"""Bytes, ``auto`` or ``off``."""
Seconds = Annotated[float, Field(ge=0, le=MOST_SECONDS)]
