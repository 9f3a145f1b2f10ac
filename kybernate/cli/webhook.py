"""``kyb webhook``: certificates of the webhook."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from kybernate.cli.errors import CliError

webhook = typer.Typer(no_args_is_help=True, help="The admission webhook.")


@webhook.callback()
def _group() -> None:
    """Keep the name of the one command."""


@webhook.command("certs")
def certs(
    secret: Annotated[str, typer.Option(help="Secret with tls.crt, tls.key and ca.crt; made when missing.")],
    service: Annotated[str, typer.Option(help="Service that the API server calls.")],
    namespace: Annotated[str, typer.Option(help="Of both.")],
    configuration: Annotated[str, typer.Option(help="MutatingWebhookConfiguration that gets the caBundle.")],
    days: Annotated[int, typer.Option(min=1, help="How long a new certificate is good.")] = 3650,
    renew_days: Annotated[int, typer.Option(min=0, help="One that ends within so many days is made anew.")] = 365,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the configuration to be there.")] = 60,
    service_account: Annotated[Path | None, typer.Option(help="Folder of the pod's token.")] = None,
) -> None:
    """Make the webhook's certificate when it is missing or about to end, and tell the API server (needs openssl)."""
    from kybernate.cli.webhook_certs import CertsError, Wanted, ensure
    from kybernate.kube import ACCOUNT, Kube, KubeError, in_cluster

    where = in_cluster()
    if where is None:
        raise CliError("this works in a pod only (KUBERNETES_SERVICE_HOST is not set); the chart has a Job for it", 2)
    wanted = Wanted(namespace, secret, service, configuration, days, renew_days)

    async def work() -> str:
        kube = Kube(where, service_account or ACCOUNT)
        try:
            return await ensure(kube, wanted, wait, lambda why: print(f"kyb: {why}", file=sys.stderr))
        finally:
            await kube.close()

    try:
        print(asyncio.run(work()))
    except (KubeError, CertsError) as error:
        raise CliError(str(error)) from None
