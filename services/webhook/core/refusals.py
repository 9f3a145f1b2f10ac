"""What is wrong with the annotations of a pod with a seat, and with the resource that it asks for. Pure.

A running pod counts as if it did not have an annotation that cannot be used (``kyb why`` shows it); a new one is
refused.
"""

from collections.abc import Iterable, Sequence

from kybernate.annotations import SeatAnnotations, group_problem, tier_problem
from kybernate.config import NodeConfig
from kybernate.config_errors import suggest


def problems(notes: SeatAnnotations, resources: Iterable[str], configs: Sequence[NodeConfig]) -> list[str]:
    """Return each problem with its remedy. Without configurations all names are accepted."""
    found = [f"annotation {problem.text()}" for problem in notes.problems]
    if not configs:
        return found
    tier = tier_problem(notes.tier, sorted({tier for config in configs for tier in config.all_tiers}))
    found += [f"annotation {tier.text()}"] if tier is not None else []
    advertised = sorted({resource for config in configs for resource in config.resources})
    for resource in resources:
        if resource not in advertised:
            found.append(f"resource {resource} is advertised by no profile; {suggest(resource, advertised)}")
        elif (problem := group_problem(notes.prefer_group, resource, configs)) is not None:
            found.append(f"annotation {problem.text()}")
    return found
