"""``kyb``, the command line. It reaches a running stack only through the router's HTTP API."""

import io
import itertools
import signal
import sys


def main(argv: list[str] | None = None) -> None:
    """The console script. Exit codes: 0 done, 1 it could not be done, 2 wrong usage or configuration, 130 Ctrl-C."""
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # make blocks it while Python itself starts
        _run(argv)
    except KeyboardInterrupt:  # while modules are imported; later Typer or the command takes it
        sys.exit(130)


def _run(argv: list[str] | None) -> None:
    from kybernate.cli.app import app  # only here: importing this package stays cheap
    from kybernate.cli.output import CliError

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an arrow that the locale does not have is no reason to end
    words = sys.argv[1:] if argv is None else argv
    json = any(pair in (("-o", "json"), ("--output", "json")) for pair in itertools.pairwise(words))
    json = json or not {"-ojson", "--output=json"}.isdisjoint(words)
    try:
        sys.exit(app(args=argv, prog_name="kyb", standalone_mode=not json) or 0)
    except CliError as error:
        _fail(str(error), error.code, error.reason, json=json)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}; check path, permissions and free space", 1, json=json)
    except Exception as error:
        from kybernate.config_errors import ConfigError
        from kybernate.extras import ExtraMissingError
        from kybernate.settings import SettingsError

        if isinstance(error, ConfigError | ExtraMissingError | SettingsError):
            _fail(str(error), 2, json=json)
        if not (json and hasattr(error, "format_message")):  # Typer's, of wrong usage
            raise
        _fail(error.format_message(), 2, json=json)


def _fail(text: str, code: int, reason: str = "", *, json: bool) -> None:
    """``reason``: the error code of the API. With JSON one line: ``{"error": {"message", "code", "reason"}}``."""
    if json:
        from json import dumps

        sys.stderr.write(dumps({"error": {"message": text, "code": code, "reason": reason}}) + "\n")
    else:
        sys.stderr.write(f"kyb: {text}\n")
    sys.exit(code)
