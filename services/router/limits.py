"""The limits of tenants as responses: which models a caller may use and see, and when it may try again."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from services.router.api import RouterError
from services.router.auth import Caller
from services.router.core.step import Reject
from services.router.core.tenants import Tenants, Tokens
from services.router.core.traffic import Traffic


@dataclass
class TenantLimits:
    """Of one router. ``rejected`` counts rejections by reason."""

    tenants: Tenants
    traffic: Traffic
    rejected: Callable[[str], None]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Models by their further names; limits are those of the models."""

    def sees(self, caller: Caller, model: str) -> bool:
        """Return whether the caller may use and see a model."""
        tenant = self.tenants.of(caller.tenant)
        return tenant is None or tenant.may_use(model)

    def resolve(self, caller: Caller, name: str) -> str:
        """Return the model of this name or alias. Raises RouterError 404 for one that the caller may not use, as for
        one that does not exist."""
        tenant, model = self.tenants.of(caller.tenant), self.aliases.get(name, name)
        if tenant is None or tenant.models == ("*",):
            return model
        if not tenant.may_use(model) or self.traffic.absent(model, time.monotonic()):
            raise self.not_found(caller, name)
        return model

    def error(self, caller: Caller, model: str, reject: Reject) -> RouterError:
        """Return the error of a rejected call."""
        if reject.code == "model_not_found":
            return self.not_found(caller, model)
        text = f"{reject.message} ({reject.detail})" if caller.views and reject.detail else reject.message
        after = max(1, math.ceil(reject.until - time.time())) if reject.until else reject.retry_after
        return RouterError(reject.status, reject.code, f"{text}; try again in {after} s", after)

    def not_found(self, caller: Caller, model: str) -> RouterError:
        """Return the error of an unknown model, which names only models that the caller may use."""
        if why := self.traffic.incomplete(time.monotonic()):
            return RouterError(503, "roster_incomplete", f"model {model!r} is not known, but may exist: {why}", 1)
        known = self.traffic.table.known_models(lambda name: self.sees(caller, name))
        text = f"model {model!r} does not exist{', or this key may not use it' if caller.tenant else ''}"
        return RouterError(404, "model_not_found", f"{text}; known models: {known}")

    def begin(self, caller: Caller, name: str) -> str:
        """Count a request, until ``end``; return its model. Raises RouterError 404 or 429."""
        model = self.resolve(caller, name)
        refused = self.tenants.begin(caller.tenant, time.monotonic())
        if refused is not None:
            self.rejected("tenant")
            why, after = refused
            text = f"the tenant {caller.tenant!r} has used up its {why}; try again in {after} s"
            raise RouterError(429, "tenant_limit", text, after)
        return model

    def end(self, caller: Caller, model: str, tokens: Tokens) -> None:
        """End a request that was begun; without keys nothing is counted."""
        if not caller.tenant:
            return
        self.tenants.end(caller.tenant, model if self.traffic.serves(model) else "unknown", tokens)
