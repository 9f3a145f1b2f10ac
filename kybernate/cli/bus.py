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

if TYPE_CHECKING:
    from kybernate.bus import Credentials
    from kybernate.bus.rights import Role

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
bus = Commands(no_args_is_help=True, help="The NATS bus: streams, keys.")

T = TypeVar("T")

NatsUrl = Annotated[str | None, typer.Option(help="Default: KYB_NATS_URL, else the running stack's.")]


@bus.command("init", epilog="Example: kyb bus init --nats-url nats://nats:4222 --replicas 3")
def init(
    nats_url: NatsUrl = None,
    replicas: Annotated[
        int | None,
        typer.Option(min=1, max=5, help="Servers that keep each stream and bucket; else as now, or 1 for new ones."),
    ] = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for a server that does not answer yet.")] = 60,
    every: Annotated[float, typer.Option(min=0, help="Repeat every N seconds; 0 runs once.")] = 0,
    beat: Annotated[Path | None, typer.Option(help="With --every: file touched after each run, for probes.")] = None,
    ready: Annotated[
        Path | None, typer.Option(help="With --every: file that exists while the last run found or made everything.")
    ] = None,
) -> None:
    """Create the streams and buckets that are missing, and bring the rest up to date, as KYB_NATS_*_FILE say."""
    from kybernate.bus import setup
    from kybernate.bus.rights import Role

    who = _credentials(Role.INIT)

    def report(why: str) -> None:
        print(f"kyb: {why}; trying again for up to {wait:g} s", file=sys.stderr)

    if every:

        def tried(complete: bool) -> None:
            if ready is not None:
                ready.touch() if complete else ready.unlink(missing_ok=True)
            if beat is not None:
                beat.touch()

        _run(setup.keep(_address(nats_url), replicas, every=every, credentials=who, report=_report, tried=tried))
    changed = _run(setup.init(_address(nats_url), replicas, credentials=who, wait=wait, on_wait=report))
    text = f"changed: {', '.join(changed)}" if changed else "nothing to do: all streams and buckets are there"
    answer({"changed": list(changed)}, text)


@bus.command("check", epilog="Example: kyb bus check --role router, with KYB_NATS_NKEY_FILE=router.nk")
def check(
    role: Annotated[str, typer.Option(help="Role of the key, e.g. router.")],
    nats_url: NatsUrl = None,
) -> None:
    """Check that a key (KYB_NATS_*_FILE) has the rights of its role. Sends only messages that no service acts on."""
    from kybernate.bus.setup import examine

    address = _address(nats_url)
    who = _role(role)
    credentials = _credentials(who)
    missing = _run(examine(address, credentials, who))
    address = address.rsplit("@")[-1]  # without a password
    if missing:
        text = "; ".join(missing)
        raise CliError(f"{address}: role {role} lacks rights: {text}; {credentials.grant}")
    answer({"server": address, "role": role}, f"{address}: good for role {role}")


@bus.command("keys", epilog="Examples: kyb bus keys --out keys · kyb bus keys --out keys --rotate router")
def keys(
    out: Annotated[Path | None, typer.Option(help="Folder for the files; keys in it are kept.")] = None,
    secret: Annotated[str | None, typer.Option(help="Kubernetes Secret for the keys.")] = None,
    namespace: Annotated[
        str, typer.Option(envvar="KYB_NAMESPACE", help="Namespace of the Secret. Default: this pod's.")
    ] = "",
    rotate: Annotated[
        str | None, typer.Option(help="Replace the key of this role; the old one becomes invalid.")
    ] = None,
    service_account: Annotated[Path, typer.Option(help="Folder of the pod's token, for --secret.")] = ACCOUNT,
) -> None:
    """Make the missing keys, one per role, and the server's list of keys with their rights."""
    if (out is None) == (secret is None):
        raise CliError("name the target: --out DIR, or --secret NAME", 2)
    rotated = _role(rotate) if rotate is not None else None
    if out is not None:
        from kybernate.bus.keys import write
        from kybernate.bus.port import BusError

        try:
            changed = write(out, rotated)
        except BusError as error:
            raise CliError(str(error)) from None
        _print_changes(str(out), changed)
    elif secret is not None:
        _run(_secret(service_account, namespace, secret, rotated))


@bus.command("users", epilog="Example: kyb bus users --account KYB | sh")
def users(
    account: Annotated[str, typer.Option(help="A separate account, which exists: nsc add account --name KYB.")],
    replicas: Annotated[int, typer.Option(min=1, max=5, help="Servers that keep each stream and bucket.")] = 1,
) -> None:
    """Print the commands of nsc that make the users of a NATS in operator mode: one per role, with its rights."""
    from kybernate.bus.keys import nsc

    commands = nsc(account, replicas)
    answer({"commands": commands}, "\n".join(commands))


async def _secret(account: Path, namespace: str, name: str, rotate: "Role | None") -> None:
    from kybernate.bus.keys import ensure
    from kybernate.kube import Kube, in_cluster

    url = in_cluster()
    if url is None:
        raise CliError("--secret works in a pod only (KUBERNETES_SERVICE_HOST is not set); elsewhere: --out DIR", 2)
    if not namespace:
        with contextlib.suppress(OSError):
            namespace = (account / "namespace").read_text().strip()
        if not namespace:
            raise CliError("name it with --namespace: this pod's service account has none", 2)
    kube = Kube(url, account)
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


def _role(name: str) -> "Role":
    from kybernate.bus.rights import Role

    try:
        return Role(name)
    except ValueError:
        raise CliError(f"there is no role {name!r}; there are {', '.join(Role)}", 2) from None


def _print_changes(where: str, changed: tuple[str, ...]) -> None:
    text = f"{where}: wrote {', '.join(changed)}" if changed else f"{where}: nothing to do, all keys are there"
    answer({"where": where, "wrote": list(changed)}, text)


def _report(text: str) -> None:
    print(f"kyb: {text}", file=sys.stderr, flush=True)


def _address(given: str | None) -> str:
    from kybernate.cli.console import find_stack

    stack = find_stack() or {}
    return given or os.environ.get("KYB_NATS_URL") or str(stack.get("nats_url", "nats://127.0.0.1:4222"))


def _run(work: Coroutine[Any, Any, T]) -> T:
    from kybernate.bus.port import BusError
    from kybernate.kube import KubeError

    try:
        return asyncio.run(work)
    except (BusError, KubeError) as error:
        raise CliError(str(error)) from None
    except KeyboardInterrupt:
        sys.exit(130)
