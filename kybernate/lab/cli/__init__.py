"""Commands of the extra ``lab``: ``kyb simulate``, ``kyb plan``, ``kyb tune`` and ``kyb advise``."""

import typer

from kybernate.lab.cli.advise import advise
from kybernate.lab.cli.plan import plan
from kybernate.lab.cli.simulate import simulate
from kybernate.lab.cli.tune import tune


def register(app: typer.Typer) -> None:
    """Add the commands to ``kyb``."""
    app.command()(simulate)
    app.command()(plan)
    app.command()(tune)
    app.command()(advise)
