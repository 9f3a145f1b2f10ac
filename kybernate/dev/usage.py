"""``kyb report usage``: what tenants have used, where no Prometheus adds it up."""

import time
from collections import Counter
from collections.abc import Sequence
from http.client import HTTPException
from typing import TYPE_CHECKING, Annotated, Any
from urllib.error import URLError
from urllib.request import urlopen

import typer

from kybernate.cli.console import ANSWER_SECONDS
from kybernate.cli.output import CliError, Commands, answer
from kybernate.dev.local_stack import local_stack
from kybernate.sizes import count

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_TENANT_REQUESTS = "kybernate_router_tenant_requests"
report_app = Commands(no_args_is_help=True, help="Requests and tokens of each tenant.")


@report_app.command("usage", epilog="Example: kyb report usage http://10.0.3.7:9474 http://10.0.3.8:9474 -o json")
def usage(
    routers: Annotated[
        list[str] | None,
        typer.Argument(metavar="[METRICS]...", help="Operations ports of all routers. Default: of the stack here."),
    ] = None,
) -> None:
    """Show requests and tokens (prompt + completion) of each tenant and model, as routers count them."""
    cluster = "kyb report usage METRICS..., or Prometheus (docs/security.md#tenants)"
    show_usage([one.rstrip("/") for one in routers or local_stack(cluster)["metrics"]])


def show_usage(addresses: Sequence[str]) -> None:
    """Print what tenants have used since the routers started, by the metrics at these addresses. Raises CliError: what
    one router does not tell is no zero."""
    sums: dict[tuple[str, str], Counter[str]] = {}
    since = time.time()
    for address in addresses:
        families = {family.name: family.samples for family in _metrics(address)}
        if _TENANT_REQUESTS not in families:
            text = (
                f"{address}/metrics has no {_TENANT_REQUESTS}_total: name a router's operations port (KYB_HEALTH_PORT)"
            )
            raise CliError(text)
        since = min([since, *(sample.value for sample in families["process_start_time_seconds"])])
        for sample in families[_TENANT_REQUESTS] + families["kybernate_router_tenant_tokens"]:
            what = f"{sample.labels['kind']}_tokens" if "kind" in sample.labels else "requests"
            of = sums.setdefault((sample.labels["tenant"], sample.labels["model"]), Counter())
            of[what] += int(sample.value)
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since))
    usage: list[dict[str, Any]] = [
        {"tenant": tenant, "model": model, **counts} for (tenant, model), counts in sorted(sums.items())
    ]
    lines = [
        f"since {began}, at {count(len(addresses), 'router')} (metric of each: kybernate_router_tenant_tokens_total)"
    ]
    if not usage:
        lines.append("nothing: only requests with an API key count (docs/security.md#tenants)")
    lines += [
        f"{row['tenant']}  {row['model']}: {count(row['requests'], 'request')}, "
        f"{row['prompt_tokens']} + {row['completion_tokens']} tokens"
        for row in usage
    ]
    answer({"since": since, "usage": usage}, "\n".join(lines))


def _metrics(address: str) -> list["Metric"]:
    """What a service counts. Raises CliError."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        with urlopen(f"{address}/metrics", timeout=ANSWER_SECONDS) as reply:
            return list(text_string_to_metric_families(reply.read().decode()))
    except (OSError, ValueError, HTTPException) as error:
        raise CliError(
            f"{address}/metrics cannot be read: {error.reason if type(error) is URLError else error}"
        ) from None
