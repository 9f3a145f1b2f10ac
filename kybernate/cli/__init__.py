"""``kyb``, the command line. It reaches a running stack only through the router's HTTP API."""

import io
import sys


def main(argv: list[str] | None = None) -> None:
    """The console script. Exit codes: 0 done, 1 it could not be done, 2 wrong usage or configuration, 130 Ctrl-C."""
    try:
        _run(argv)
    except KeyboardInterrupt:  # while modules are imported; later Typer or the command takes it
        sys.exit(130)


def _run(argv: list[str] | None) -> None:
    from kybernate.cli.app import app  # only here: importing this package stays cheap
    from kybernate.cli.output import CliError
    from kybernate.config_errors import ConfigError

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an arrow that the locale does not have is no reason to end
    try:
        app(args=argv, prog_name="kyb")
    except CliError as error:
        _fail(str(error), error.code)
    except ConfigError as error:
        _fail(str(error), 2)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}; check path, permissions and free space", 1)


def _fail(text: str, code: int) -> None:
    sys.stderr.write(f"kyb: {text}\n")
    sys.exit(code)
