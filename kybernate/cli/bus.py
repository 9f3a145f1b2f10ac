"""``kyb bus``: streams and buckets, keys."""

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from kybernate.cli.output import CliError, Commands, answer
from kybernate.local_stack import find_stack

if TYPE_CHECKING:
    from kybernate.bus.credentials import Credentials
    from kybernate.bus.rights import Role

KEPT_SECONDS = 10.0
"""Between two runs of ``kyb bus init --keep``."""
bus = Commands(no_args_is_help=True, help="The NATS bus: streams, keys.")

T = TypeVar("T")


@bus.command("init", epilog="Example: kyb bus init --replicas 3, with KYB_NATS_URL=nats://nats:4222")
def init(
    replicas: Annotated[
        int | None,
        typer.Option(min=1, max=5, help="Servers that keep each stream and bucket; else as now, or 1 for new ones."),
    ] = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for a server that does not answer yet.")] = 60,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Repeat every 10 s, for probes: touch FOLDER/beat each time; FOLDER/ready is there after a good run.",
        ),
    ] = None,
) -> None:
    """Create the streams and buckets that are missing, and bring the rest up to date, as KYB_NATS_URL (else the running
    stack's) and KYB_NATS_*_FILE say."""
    from kybernate.bus import setup
    from kybernate.bus.rights import Role

    who = _credentials(Role.INIT)

    def report(why: str) -> None:
        print(f"kyb: {why}; trying again for up to {wait:g} s", file=sys.stderr)

    if keep is not None:
        ready, beat = keep / "ready", keep / "beat"

        def tried(complete: bool) -> None:
            ready.touch() if complete else ready.unlink(missing_ok=True)
            beat.touch()

        _run(setup.keep(_address(), replicas, every=KEPT_SECONDS, credentials=who, report=_report, tried=tried))
    changed = _run(setup.init(_address(), replicas, credentials=who, wait=wait, on_wait=report))
    text = f"changed: {', '.join(changed)}" if changed else "nothing to do: all streams and buckets are there"
    answer({"changed": list(changed)}, text)


@bus.command("keys", epilog="Examples: kyb bus keys --out keys · kyb bus keys --out keys --rotate router")
def keys(
    out: Annotated[Path | None, typer.Option(help="Folder for the files; keys in it are kept.")] = None,
    secret: Annotated[
        str | None, typer.Option(help="Kubernetes Secret for the keys, in KYB_NAMESPACE, else this pod's.")
    ] = None,
    rotate: Annotated[
        str | None, typer.Option(help="Replace the key of this role; the old one becomes invalid.")
    ] = None,
) -> None:
    """Make the missing keys, one per role, and the server's list of keys with their rights."""
    if (out is None) == (secret is None):
        raise CliError("name the target: --out DIR, or --secret NAME", 2)
    from kybernate.bus.rights import Role

    if rotate is not None and rotate not in set(Role):
        raise CliError(f"there is no role {rotate!r}; there are {', '.join(Role)}", 2)
    rotated = Role(rotate) if rotate is not None else None
    if out is not None:
        from kybernate.bus.keys import write
        from kybernate.bus.port import BusError

        try:
            changed = write(out, rotated)
        except BusError as error:
            raise CliError(str(error)) from None
        _print_changes(str(out), changed)
    elif secret is not None:
        _run(_secret(secret, rotated))


async def _secret(name: str, rotate: "Role | None") -> None:
    from kybernate import kube as api
    from kybernate.bus.keys import ensure

    url, namespace = api.in_cluster(), os.environ.get("KYB_NAMESPACE", "")
    if url is None:
        raise CliError("--secret works in a pod only (KUBERNETES_SERVICE_HOST is not set); elsewhere: --out DIR", 2)
    if not namespace:
        with contextlib.suppress(OSError):
            namespace = (api.ACCOUNT / "namespace").read_text().strip()
        if not namespace:
            raise CliError("name it by KYB_NAMESPACE: this pod's service account has none", 2)
    kube = api.Kube(url, api.ACCOUNT)
    try:
        changed = await ensure(kube, namespace, name, rotate)
        _print_changes(f"Secret {namespace}/{name}", changed)
    finally:
        await kube.close()


def _credentials(role: "Role") -> "Credentials":
    """The files that ``KYB_NATS_*_FILE`` name, as for the services."""
    from kybernate.settings import PREFIX, Settings

    files = {name: os.environ.get(name, "") for name in os.environ if re.fullmatch(rf"{PREFIX}NATS_\w+_FILE", name)}
    return Settings.from_env(files).credentials(role)


def _print_changes(where: str, changed: tuple[str, ...]) -> None:
    text = f"{where}: wrote {', '.join(changed)}" if changed else f"{where}: nothing to do, all keys are there"
    answer({"where": where, "wrote": list(changed)}, text)


def _report(text: str) -> None:
    print(f"kyb: {text}", file=sys.stderr, flush=True)


def _address() -> str:
    stack = find_stack() or {}
    return os.environ.get("KYB_NATS_URL") or str(stack.get("nats_url", "nats://127.0.0.1:4222"))


def _run(work: Coroutine[Any, Any, T]) -> T:
    from kybernate.bus.port import BusError
    from kybernate.kube import KubeError

    try:
        return asyncio.run(work)
    except (BusError, KubeError) as error:
        raise CliError(str(error)) from None
    except KeyboardInterrupt:
        sys.exit(130)
