"""``kyb advise``: which way to share GPUs fits these workloads?"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kybernate.cli.output import CliError, as_json

if TYPE_CHECKING:
    from kybernate.lab.advise import Advice, Costs, FleetCost, Workload


def advise(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="Descriptions (docs/dev/advise.md) or manifests of Kubernetes.")
    ],
    gpu: Annotated[str, typer.Option(help="The GPU to plan for; default: the description's, else H100.")] = "",
    cost: Annotated[
        str,
        typer.Option(help="Of a switch: as kyb simulate --cost; or a GPU manager's ledger: what was measured there."),
    ] = "stock",
    explain: Annotated[bool, typer.Option("--explain", help="All reasons with their sources, and the risks.")] = False,
) -> None:
    """Dedicated GPU, MIG, MPS, time slicing, a seat, an adapter or no GPU: which fits each workload, why, and what the
    fleet costs."""
    from kybernate.config_errors import ConfigError
    from kybernate.lab import advise as lab
    from kybernate.lab.cli.simulate_input import Inputs, switch_costs

    try:
        workloads, described, costs = _read(files)
        product = _known(gpu or described or "H100")
    except ConfigError as error:
        raise CliError(str(error), 2) from None
    switch, _ = switch_costs(Inputs(cost=cost, measured=Path(cost) if Path(cost).is_file() else None))
    found = lab.advise_fleet(workloads, product, costs, switch)
    chosen = [(one, advice.strategy) for one, advice in zip(workloads, found, strict=True) if advice.strategy]
    before = lab.fleet_cost(lab.whole_gpus(chosen), product, costs)
    after = lab.fleet_cost(chosen, product, costs)
    gpus = lab.fleet_gpus(chosen, product)
    if as_json():
        _print_json(product, found, gpus, before, after, costs)
    else:
        _show(workloads, found, explain)
        _show_fleet(gpus, before, after)
    if len(chosen) < len(found):
        raise CliError("no strategy is possible for: " + ", ".join(one.workload for one in found if not one.strategy))


def _read(files: Sequence[Path]) -> "tuple[list[Workload], str, Costs]":
    """Workloads of all files, the GPU that they name, costs. A description adds to the manifest of the same name.

    Raises ConfigError.
    """
    from kybernate.config_errors import ConfigError, Document, read_documents
    from kybernate.lab.advise import WORKLOAD_KINDS, Costs, Description, Workload, knowledge, stated

    documents = [document for path in files for document in read_documents(path)]
    manifests: dict[str, dict[str, Any]] = {}
    sources: dict[str, Document] = {}
    names: set[str] = set()
    stated_names: set[str] = set()
    for document in documents:
        if isinstance(document.data, dict) and document.data.get("kind") in WORKLOAD_KINDS:
            found = stated(document.data)
            _once(found["name"], stated_names)
            manifests[found["name"]], sources[found["name"]] = found, document
    workloads: list[Workload] = []
    gpu, costs = "", knowledge().costs.model_dump(by_alias=True)
    for document in documents:
        if not isinstance(document.data, dict) or "workloads" not in document.data:
            continue
        described = document.validate(Description, document.data)
        gpu = described.gpu or gpu
        costs = document.validate(Costs, costs | described.costs, ("costs",)).model_dump(by_alias=True)
        for place, given in enumerate(described.workloads):
            known = manifests.pop(str(given.get("name")), {}) | given
            workload = document.validate(Workload, known, ("workloads", place))
            _once(workload.name, names)
            workloads.append(workload)
    for name, found in manifests.items():
        if "kind" not in found:
            raise ConfigError(
                f"{name}: no known engine, and no Job; describe it in a file: workloads: [{{name: {name}, kind: …}}]"
            )
        workloads.append(sources[name].validate(Workload, found))
    adapters = {one.name for one in workloads if one.adapter_of}
    for one in workloads:
        if one.adapter_of in adapters:
            raise ConfigError(f"{one.name}: adapterOf {one.adapter_of} is an adapter itself; name the model it adapts")
    if not workloads:
        raise ConfigError(f"{files[0]}: no workloads; write them as in docs/dev/advise.md, or give a Deployment")
    return workloads, gpu, Costs.model_validate(costs)


def _once(name: str, names: set[str]) -> None:
    from kybernate.config_errors import ConfigError

    if name in names:
        raise ConfigError(f"two workloads are called {name}; give each a unique name")
    names.add(name)


def _known(gpu: str) -> str:
    from kybernate.config_errors import ConfigError, suggest
    from kybernate.lab.advise import knowledge

    if gpu not in knowledge().gpus:
        raise ConfigError(f"GPU {gpu}: is not known; {suggest(gpu, knowledge().gpus)}")
    return gpu


def _show(workloads: "Sequence[Workload]", found: "Sequence[Advice]", explain: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    from kybernate.cli.show import open_console

    console = open_console()
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("workload", "advice", "because"):
        table.add_column(column)
    for one in found:
        table.add_row(*map(Text, (one.workload, one.strategy or "none is possible", one.because)))
    console.print(table)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    for workload, one in zip(workloads, found, strict=True):
        lines = [f"contradiction: {text}" for text in one.contradictions]
        lines += [f"needs: {text}" for text in one.needs]
        lines += [f"not known: {', '.join(one.unknown)}; the advice may change with it"] if one.unknown else []
        if explain:
            lines += [f"{reason.effect}: {reason.text} [{reason.source}]" for reason in one.reasons]
            lines += [f"risk: {text}" for text in one.risks]
        if lines:
            say(f"\n{workload.name}")
            for line in lines:
                say(f"  {line}")


def _show_fleet(gpus: dict[str, int], before: "FleetCost", after: "FleetCost") -> None:
    from rich.table import Table

    from kybernate.cli.show import open_console

    console = open_console()
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in (
        "a year",
        "GPUs",
        "utilisation",
        "hardware",
        "power",
        "operations",
        "host memory",
        "cloud",
        "total",
        "of it unused",
    ):
        table.add_column(column, justify="left" if column == "a year" else "right")
    for name, one in (("all dedicated", before), ("as advised", after)):
        used = "not known" if one.utilisation is None else f"{one.utilisation:.0%}"
        paid = (one.hardware, one.power, one.operations, one.host_memory, one.cloud, one.total)
        unused = "not known" if one.unused is None else f"{one.unused:,.0f}"
        table.add_row(name, str(one.gpus), used, *(f"{value:,.0f}" for value in paid), unused)
    console.print()
    console.print(table)
    parts = ", ".join(f"{count} {name}" for name, count in gpus.items())
    saved = f"; {1 - after.total / before.total:.0%} less a year" if 0 < after.total < before.total else ""
    console.print(f"GPUs: {parts}{saved}", markup=False, soft_wrap=True)
    if {"seats", "packed"} & gpus.keys():
        console.print("GPUs for seats are an estimate; kyb plan TRACE plays your traffic", markup=False, soft_wrap=True)


def _print_json(
    gpu: str, found: "Sequence[Advice]", gpus: dict[str, int], before: "FleetCost", after: "FleetCost", costs: "Costs"
) -> None:
    import json
    from dataclasses import asdict

    fleets = {name: asdict(one) | {"total": one.total} for name, one in (("dedicated", before), ("advised", after))}
    answer = {"gpu": gpu, "costs": costs.model_dump(), "workloads": [asdict(one) for one in found], "gpus": gpus}
    print(json.dumps(answer | {"fleet": fleets}))
