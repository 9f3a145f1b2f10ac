"""Logs as facts: a constant ``noun.verb`` and data. JSON, or pretty on a terminal."""

import logging
import sys
from typing import Literal

if _hidden := "rich" not in sys.modules:
    sys.modules["rich"] = None  # type: ignore[assignment]
import structlog  # imports rich where that is installed: 3 MB in each service, for tracebacks on a terminal

if _hidden:
    del sys.modules["rich"]


def configure(
    service: str,
    *,
    form: Literal["auto", "json", "pretty"] = "auto",
    level: Literal["debug", "info", "warning", "error"] = "info",
    **bound: str,
) -> None:
    """Set up logging of this process; every line carries ``service`` and ``bound``. Writes to stderr."""
    pretty = form == "pretty" or (form == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
        if pretty
        else structlog.processors.JSONRenderer(sort_keys=False)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if pretty else [structlog.processors.format_exc_info]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(service=service, **bound)


def get_logger() -> structlog.typing.FilteringBoundLogger:
    """The logger of this process."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return logger


class OnceLogger:
    """Log a condition that lasts once, not at every try: again when its data change, or after ``clear``.

    Further tries are counted, and their number is logged at the end.
    """

    def __init__(self, event: str, *, level: Literal["debug", "info", "warning", "error"] = "warning") -> None:
        self._event, self._level = event, level
        self._last: dict[str, object] | None = None
        self._repeated = 0

    def log(self, **data: object) -> None:
        """Log the event with ``data`` unless the last call since ``clear`` had the same data."""
        if data == self._last:
            self._repeated += 1
            return
        self._last = data
        getattr(get_logger(), self._level)(self._event, **data)

    def clear(self) -> None:
        """The condition is over: log it anew when it returns."""
        if self._repeated:
            get_logger().info(self._event, over=True, repeated=self._repeated)
        self._last, self._repeated = None, 0
