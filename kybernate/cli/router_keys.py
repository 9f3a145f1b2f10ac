"""``kyb router keys``: the API keys of routers. The file holds hashes only; a key is shown once, when it is made."""

import os
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kybernate import files
from kybernate.cli.output import CliError, Commands, answer

if TYPE_CHECKING:
    from kybernate.api_keys import KeyFile

router = Commands(no_args_is_help=True, help="API keys of routers.")
keys_app = Commands(no_args_is_help=True, help="API keys in the file of KYB_API_KEYS_FILE.")
router.add_typer(keys_app, name="keys")

_file: ContextVar[Path | None] = ContextVar("file", default=None)


def _keep_file(context: typer.Context, value: Path | None) -> None:
    if value is not None or context.command.name == "keys":
        _file.set(value)


@keys_app.callback()
def _options(
    file: Annotated[
        Path | None,
        typer.Option(
            callback=_keep_file,
            expose_value=False,
            help="The file; created if it does not exist. Default: KYB_API_KEYS_FILE.",
        ),
    ] = None,
) -> None:
    """API keys in the file of KYB_API_KEYS_FILE."""


Name = Annotated[str, typer.Argument(help="Name of the caller, for audit records.")]


@keys_app.command("add", epilog="Example: kyb router keys add ops --scope admin --file keys.yaml")
def add(
    name: Name,
    scope: Annotated[
        list[str] | None, typer.Option(help="infer, gateway, view, signals, admin; several times.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="One of the file's tenants, whose limits hold.")] = None,
) -> None:
    """Make a key and print it; it cannot be shown again. Running routers load it within seconds."""
    from kybernate.api_keys import make

    known = _read(file := _chosen())
    if any(key.name == name for key in known.keys):
        raise CliError(f"{file} has a key {name!r} already; remove it first, or choose another name")
    names = [of.name for of in known.tenants]
    if tenant is None and name in names:
        raise CliError(f"{file} has a tenant {name!r}; choose another name, or add --tenant {name}")
    if tenant is not None and tenant not in names:
        raise CliError(f"{file} has no tenant {tenant!r}; it has {', '.join(names) or 'none'}: see docs/security.md")
    row, token = make(name, scope or ["infer"])
    _write(file, known.model_copy(update={"keys": (*known.keys, row.model_copy(update={"tenant": tenant}))}))
    answer({"name": name, "scopes": list(row.scopes), "tenant": tenant, "key": token}, token)


@keys_app.command("list", epilog="Example: kyb router keys list --file keys.yaml -o json")
def show() -> None:
    """Show names, scopes and tenants."""
    file = _chosen()
    if not file.exists():
        raise CliError(f"{file}: there is no such file; name another with --file, or make it: kyb router keys add")
    keys = _read(file).keys
    lines = [f"{key.name}: {', '.join(key.scopes)}{f' (tenant {key.tenant})' if key.tenant else ''}" for key in keys]
    rows = [{"name": key.name, "scopes": list(key.scopes), "tenant": key.tenant} for key in keys]
    answer({"keys": rows}, "\n".join(lines))


@keys_app.command("remove", epilog="Example: kyb router keys remove ops --file keys.yaml")
def remove(name: Name) -> None:
    """Remove a key; routers then refuse it."""
    known = _read(file := _chosen())
    left = tuple(key for key in known.keys if key.name != name)
    if len(left) == len(known.keys):
        raise CliError(f"{file} has no key {name!r}; it has {', '.join(key.name for key in known.keys) or 'none'}")
    if not left:
        raise CliError(f"{name!r} is the last key of {file}, and routers refuse an empty file; add another one first")
    _write(file, known.model_copy(update={"keys": left}))
    answer({"removed": name, "left": [key.name for key in left]}, f"{name} is removed; routers refuse it")


def _chosen() -> Path:
    named = _file.get() or os.environ.get("KYB_API_KEYS_FILE")
    if not named:
        raise CliError("name the file: --file FILE, or KYB_API_KEYS_FILE", 2)
    return Path(named)


def _read(file: Path) -> "KeyFile":
    from kybernate.api_keys import KeyFile, load

    return load(file) if file.exists() else KeyFile()


def _write(file: Path, found: "KeyFile") -> None:
    """Replace the file atomically; routers read it meanwhile."""
    from kybernate.api_keys import dump

    try:
        files.replace(
            file,
            dump(found.keys, found.tenants),
            durable=False,
            mode=file.stat().st_mode & 0o777 if file.exists() else 0o640,
        )
    except OSError as error:
        raise CliError(f"{file}: {error.strerror}; check the path and its permissions") from None
