"""Commands of the extra ``lab``: ``kyb simulate``, ``kyb plan``, ``kyb tune`` and ``kyb advise``."""

import typer

from kybernate.lab.cli.advise import advise
from kybernate.lab.cli.plan import plan
from kybernate.lab.cli.simulate import simulate
from kybernate.lab.cli.tune import tune


def register(app: typer.Typer) -> None:
    """Add the commands to ``kyb``."""
    app.command(epilog="Example: kyb simulate trace.csv.gz --groups 2 --policy kyb-balanced,exhaustive -o json")(
        simulate
    )
    app.command(epilog="Example: kyb plan trace.csv.gz --slo 20:0.95 --gpu H100 -o json")(plan)
    app.command(epilog="Example: kyb tune trace.csv.gz --days 6 --out policy.yaml")(tune)
    app.command(epilog="Example: kyb advise fleet.yaml --gpu H100 --explain")(advise)
