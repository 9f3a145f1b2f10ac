"""Files of API keys."""

from collections.abc import Sequence
from pathlib import Path

from kybernate.api_keys import Scope, Tenant, dump, make


def key_file(folder: Path, tenants: Sequence[Tenant] = (), **scopes: Sequence[Scope]) -> tuple[Path, dict[str, str]]:
    """A file of keys with these scopes, and the token of each by its name; one named as a tenant is of that tenant."""
    made, named = {name: make(name, of) for name, of in scopes.items()}, {tenant.name for tenant in tenants}
    rows = [row.model_copy(update={"tenant": name if name in named else None}) for name, (row, _) in made.items()]
    (path := folder / "keys.yaml").write_text(dump(rows, tenants))
    return path, {name: token for name, (_, token) in made.items()}
