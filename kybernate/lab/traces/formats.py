"""Arrivals and the formats of traces: how each format is recognised and what one row of it means. Pure; no files here.

A row without work (a failed request without tokens) is None and is left out.

* ``azure-llm``: TIMESTAMP, ContextTokens, GeneratedTokens (AzurePublicDataset, 2023 and 2024); one model per file.
* ``mooncake-csv``: timestamp_ms, input_length, output_length; ``mooncake-jsonl``: timestamp, input_length,
  output_length, hash_ids (FAST'25 release); one model per file.
* ``many-model``: arrival_s, model, prompt_tokens, output_tokens.
* ``burstgpt``: Timestamp, Model, Request tokens, Response tokens, Total tokens, Log Type, and newer columns.
* ``gentd26``: ``lora_request_trace.csv`` of Alibaba GenTD26. Image generation: the model identity and the arrivals
  count; four characters of prompt are taken as a token, ``DECODE_SECONDS_PER_TOKEN`` of execution as one of output.
* ``access-log``: one JSON object per line with ``time`` (ISO or unix seconds), ``model``, ``prompt_tokens`` and
  ``output_tokens`` among other keys; lines may be in the order in which answers ended.
* ``router-log``: JSON lines of a router with ``KYB_ACCESS_LOG=true``; other lines of its log are left out, so are
  calls that failed. The seconds in flight become output tokens (``DECODE_SECONDS_PER_TOKEN``).
* ``prometheus`` (an answer of its ``query_range``) and ``servegen-windows`` hold no arrivals but statistics of them;
  ``windows.py`` draws from them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple


class TraceError(Exception):
    """A trace cannot be read; the text says file, line (0: none), what is wrong and what to do."""

    def __init__(self, path: str, line: int, what: str, remedy: str) -> None:
        super().__init__(f"{path}:{line}: {what}; {remedy}" if line else f"{path}: {what}; {remedy}")


class Arrival(NamedTuple):
    """One request."""

    at_seconds: float
    """Since the start of the trace (or of the part of it that was asked for)."""
    model: str
    prompt_tokens: int
    """At least 1."""
    output_tokens: int
    """At least 1."""


@dataclass(frozen=True)
class Trace:
    """Arrivals in order of time. Each iteration reads the file anew; errors come up while iterating."""

    name: str
    format: str
    """Name of the recognised format, e.g. ``azure-llm``."""
    read: Callable[[], Iterator[Arrival]]

    def __iter__(self) -> Iterator[Arrival]:
        return self.read()

    def weights(self) -> dict[str, int]:
        """Output tokens by model, heaviest first: what each model asks of its GPU. Reads the whole trace."""
        totals: dict[str, int] = {}
        for arrival in self:
            totals[arrival.model] = totals.get(arrival.model, 0) + arrival.output_tokens
        return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))


DECODE_SECONDS_PER_TOKEN = 0.025
"""Of one stream of a mid-size model. A trace without tokens gets so many that its request takes as long in flight."""

_MOST_TOKENS = 10**9
LATEST = {True: 1e11, False: 3e8}
"""Seconds, by ``Format.clock``: before the year 5138, within ten years of the start. Later ones have another unit."""
Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Format:
    """One way of writing arrivals down."""

    name: str
    columns: frozenset[str]
    """The header (or the keys of the first object) has at least these."""
    jsonl: bool
    clock: bool
    """Times are moments, not seconds since the start: the first one becomes 0."""
    row: Callable[[Fields, str], Arrival | None]
    """Reads one row; the second argument is the file's name. Raises ValueError or KeyError."""
    by_end: bool = False
    """Rows are in the order in which requests ended, of one source after the other: all are read and sorted."""


def recognise(names: frozenset[str], jsonl: bool) -> Format | None:
    """The format whose columns are all there, the one with most columns first; None when there is none."""
    fitting = [known for known in FORMATS if known.jsonl == jsonl and known.columns <= names]
    return max(fitting, key=lambda known: len(known.columns), default=None)


def _azure(row: Fields, file_model: str) -> Arrival:
    return _arrival(_moment(row["TIMESTAMP"]), file_model, _count(row, "ContextTokens"), _count(row, "GeneratedTokens"))


def _mooncake_csv(row: Fields, file_model: str) -> Arrival:
    at = _number(row, "timestamp_ms") / 1000
    return _arrival(at, file_model, _count(row, "input_length"), _count(row, "output_length"))


def _mooncake_jsonl(row: Fields, file_model: str) -> Arrival:
    at = _number(row, "timestamp") / 1000
    return _arrival(at, file_model, _count(row, "input_length"), _count(row, "output_length"))


def _many_model(row: Fields, _: str) -> Arrival:
    at = _number(row, "arrival_s")
    return _arrival(at, _name(row, "model"), _count(row, "prompt_tokens"), _count(row, "output_tokens"))


def _burstgpt(row: Fields, _: str) -> Arrival | None:
    output = _count(row, "Response tokens")
    if output == 0:  # a failure, by the data set's own words
        return None
    return _arrival(_number(row, "Timestamp"), _name(row, "Model"), _count(row, "Request tokens"), output)


def _gentd26(row: Fields, _: str) -> Arrival | None:
    if row["predict_status"] != "SUCCEED":  # the others have no execution time
        return None
    prompt = round(_number(row, "prompt_length") / 4) if row["prompt_length"] else 1
    output = round(_number(row, "exec_time_seconds") / DECODE_SECONDS_PER_TOKEN)
    return _arrival(_moment(row["gmt_create"]), _name(row, "checkpoint_model_version_id"), prompt, output)


def _access_log(row: Fields, _: str) -> Arrival:
    at = row["time"]
    seconds = _moment(at) if isinstance(at, str) else _number(row, "time")
    return _arrival(seconds, _name(row, "model"), _count(row, "prompt_tokens"), _count(row, "output_tokens"))


def _router_log(row: Fields, _: str) -> Arrival | None:
    if row["event"] != "request.ended" or _number(row, "status") >= 400:
        return None
    seconds = _number(row, "seconds")
    flight = max(0.0, seconds - _number(row, "held_seconds"))
    at = max(0.0, _moment(row["timestamp"]) - seconds)
    return _arrival(at, _name(row, "model"), 1, round(flight / DECODE_SECONDS_PER_TOKEN))


def _arrival(at: float, model: str, prompt: int, output: int) -> Arrival:
    return Arrival(at, model, max(1, prompt), max(1, output))


def _number(row: Fields, name: str) -> float:
    try:
        value = float(row[name])
    except (TypeError, ValueError):
        what = "has no value" if row[name] in (None, "") else f"is {row[name]!r}, not a number"
        raise ValueError(f"{name} {what}") from None
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name} is {row[name]!r}, which is negative or no number")
    return value


def _count(row: Fields, name: str) -> int:
    if (value := _number(row, name)) > _MOST_TOKENS:
        raise ValueError(f"{name} is {row[name]!r}, more than any model reads or writes")
    return int(value)


def _name(row: Fields, column: str) -> str:
    if not row[column]:
        raise ValueError(f"{column} is empty")
    if not str(row[column]).isprintable():
        raise ValueError(f"{column} is {row[column]!r}, which cannot be printed")
    return str(row[column])


def _moment(text: str) -> float:
    """Unix seconds of ``2023-11-16 18:17:03.9799600`` (seven digits) or any ISO time; without a zone it is UTC."""
    head, dot, tail = text.partition(".")
    digits = len(tail) - len(tail.lstrip("0123456789"))
    try:
        moment = datetime.fromisoformat(head + dot + tail[: min(digits, 6)].ljust(6, "0") * bool(dot) + tail[digits:])
    except ValueError:
        raise ValueError(f"{text!r} is not a time like 2023-11-16 18:17:03.979960") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


FORMATS: tuple[Format, ...] = (
    Format("azure-llm", frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}), False, True, _azure),
    Format("mooncake-csv", frozenset({"timestamp_ms", "input_length", "output_length"}), False, False, _mooncake_csv),
    Format("mooncake-jsonl", frozenset({"timestamp", "input_length", "output_length"}), True, False, _mooncake_jsonl),
    Format(
        "many-model", frozenset({"arrival_s", "model", "prompt_tokens", "output_tokens"}), False, False, _many_model
    ),
    Format("burstgpt", frozenset({"Timestamp", "Model", "Request tokens", "Response tokens"}), False, False, _burstgpt),
    Format(
        "gentd26",
        frozenset(
            {"gmt_create", "predict_status", "exec_time_seconds", "prompt_length", "checkpoint_model_version_id"}
        ),
        False,
        True,
        _gentd26,
    ),
    Format("router-log", frozenset({"event", "timestamp"}), True, True, _router_log, by_end=True),
    Format("access-log", frozenset({"time", "model", "prompt_tokens", "output_tokens"}), True, True, _access_log),
)
