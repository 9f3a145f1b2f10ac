"""Opening trace files: recognise the format, read row by row, keep order, cut out the asked part."""

import csv
import gzip
import heapq
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from kybernate.files import opened
from kybernate.lab.traces import windows
from kybernate.lab.traces.formats import FORMATS, LATEST, Arrival, Format, Trace, TraceError, recognise

_REORDER = 512
"""Rows may come this many places late (logs are written at the end of a request)."""

_ENDINGS = (".gz", ".csv", ".jsonl", ".json", ".log")


def load(path: str | Path, start: float = 0.0, duration: float | None = None, *, seed: int = 0) -> Trace:
    """Open a trace; only its header is read now.

    ``start`` and ``duration`` (seconds of the trace) cut out a part, whose times begin at 0. ``seed`` matters to
    formats that hold statistics instead of arrivals. Raises TraceError when the file or its format is unreadable.
    """
    path = Path(path)
    known = _recognised(path)
    name = _stem(path)
    end = float("inf") if duration is None else start + duration

    def read() -> Iterator[Arrival]:
        if isinstance(known, Format):
            rows = _rows(path, known, name)
        else:
            clients = _of_prometheus(path) if known == _PROMETHEUS else _of_servegen(path, start, end)
            rows = windows.merged(clients, seed)
        for arrival in rows:
            if arrival.at_seconds >= end:
                return
            if arrival.at_seconds >= start:
                yield arrival._replace(at_seconds=arrival.at_seconds - start)

    return Trace(name, known.name if isinstance(known, Format) else known, read)


_PROMETHEUS, _SERVEGEN = "prometheus", "servegen-windows"
"""Formats that hold statistics of arrivals."""


def _recognised(path: Path) -> Format | str:
    """The format of the file, or the name of one that holds statistics."""
    for line, text in _lines(path):
        first = text.strip().lstrip("\ufeff")
        if not first:
            continue
        jsonl = first.startswith("{")
        names = frozenset(_object(path, line, first) if jsonl else (name.strip() for name in next(csv.reader([first]))))
        if known := recognise(names, jsonl):
            return known
        if jsonl and names >= {"status", "data"}:
            return _PROMETHEUS
        if not jsonl and names >= windows.COLUMNS:
            return _SERVEGEN
        kinds = ", ".join(sorted([*(one.name for one in FORMATS), _PROMETHEUS, _SERVEGEN]))
        seen = ", ".join(sorted(names))
        raise TraceError(str(path), line, f"no known trace has the columns {seen}", f"known formats: {kinds}")
    raise TraceError(str(path), 1, "the file is empty", "give a trace with a header and rows")


def _rows(path: Path, known: Format, name: str) -> Iterator[Arrival]:
    """Arrivals of the file in order of time; a format with moments begins at 0."""
    zero: float | None = 0.0 if not known.clock else None
    rows = _parsed(path, known, name)
    for arrival in sorted(one for _, one in rows) if known.by_end else _ordered(path, rows):
        if zero is None:
            zero = arrival.at_seconds
        yield arrival._replace(at_seconds=arrival.at_seconds - zero) if zero else arrival


def _parsed(path: Path, known: Format, name: str) -> Iterator[tuple[int, Arrival]]:
    for line, row in _objects(path) if known.jsonl else _records(path):
        try:
            arrival = known.row(row, name)
        except KeyError as error:
            raise TraceError(str(path), line, f"{error.args[0]} is missing", "complete or remove the row") from None
        except ValueError as error:
            raise TraceError(str(path), line, str(error), "correct or remove the row") from None
        if arrival is not None and arrival.at_seconds > LATEST[known.clock]:
            remedy = "write seconds" if known.clock else "write seconds since the start of the trace"
            raise TraceError(str(path), line, f"{arrival.at_seconds:.0f} s are later than any request", remedy)
        if arrival is not None:
            yield line, arrival


def _ordered(path: Path, rows: Iterator[tuple[int, Arrival]]) -> Iterator[Arrival]:
    """Put rows that are a little late where they belong. Raises TraceError for one that is too late."""
    heap: list[tuple[float, int, Arrival]] = []
    given = float("-inf")
    for line, arrival in rows:
        if arrival.at_seconds < given:
            raise TraceError(str(path), line, "this arrival is long before those above it", "sort the file by time")
        heapq.heappush(heap, (arrival.at_seconds, line, arrival))
        if len(heap) > _REORDER:
            given, _, first = heapq.heappop(heap)
            yield first
    while heap:
        yield heapq.heappop(heap)[2]


def _of_prometheus(path: Path) -> dict[str, list[windows.Window]]:
    try:
        return windows.of_prometheus(next(answer for _, answer in _objects(path)))
    except ValueError as error:
        raise TraceError(str(path), 1, str(error), "docs/dev/plan.md has the query") from None


def _of_servegen(path: Path, start: float, end: float) -> dict[str, list[windows.Window]]:
    """Windows by client; only those that touch the asked part are kept in memory."""
    clients: dict[str, list[windows.Window]] = {}
    for line, row in _records(path):
        try:
            begin = float(row["window_start_s"])
            window = windows.Window(begin, float(row["rate_rps"]), row["pattern"], float(row["shape"]))
        except (TypeError, ValueError) as error:
            raise TraceError(str(path), line, str(error), "correct or remove the row") from None
        if window.pattern not in ("Gamma", "Weibull") or window.rate <= 0 or window.shape <= 0:
            raise TraceError(
                str(path), line, f"pattern {window.pattern!r}, rate {window.rate:g}, shape {window.shape:g}",
                "the pattern must be Gamma or Weibull, rate and shape above 0",
            )  # fmt: skip
        if begin + windows.WINDOW_SECONDS > start and begin < end:
            clients.setdefault(f"{row['model']}-c{row['client']}", []).append(window)
    return clients


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of a CSV by column name, with their line."""
    header: list[str] | None = None
    for line, text in _lines(path):
        if not text.strip():
            continue
        fields = next(csv.reader([text.strip().lstrip("\ufeff")]))
        if header is None:
            header = [name.strip() for name in fields]
        elif len(fields) != len(header):
            raise TraceError(
                str(path),
                line,
                f"{len(fields)} fields under {len(header)} columns",
                "is the file cut off? get it again",
            )
        else:
            yield line, dict(zip(header, fields, strict=True))


def _objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, text in _lines(path):
        if text.strip():
            yield line, _object(path, line, text)


def _object(path: Path, line: int, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise TraceError(str(path), line, "the line is not a JSON object", "is the file cut off? get it again")
    return value


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of a plain or gzip file, whatever its name says."""
    line = 0
    try:
        with _opened(path) as file:
            for line, text in enumerate(file, start=1):
                yield line, text
    except FileNotFoundError:
        raise TraceError(str(path), 0, "there is no such file", "check the path") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise TraceError(str(path), line + 1, f"cannot be read ({error})", "get the file again") from None


def _opened(path: Path) -> TextIO:
    with opened(path) as probe:
        packed = probe.read(2) == b"\x1f\x8b"
    if packed:
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _stem(path: Path) -> str:
    """The file's name without its endings: the model of a file that names none."""
    name = path.name
    while name.endswith(_ENDINGS):
        name = name.rpartition(".")[0]
    return name or path.name
