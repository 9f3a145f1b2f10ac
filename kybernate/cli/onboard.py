"""``kyb onboard``, ``kyb adopt``: a Deployment becomes a seat, its Service leads to routers."""

import difflib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from kybernate.cli.kubectl import kubectl
from kybernate.cli.output import CliError, as_json

Json = dict[str, Any]
LIVE = ("deploy/", "statefulset/", "service/")
"""Targets of the cluster; others are files."""
Target = Annotated[str, typer.Argument(metavar="FILE|deploy/NAME", help="A manifest, or a Deployment of the cluster.")]
Namespace = Annotated[str, typer.Option("--namespace", "-n", help="Of the Deployment; default: kubectl's.")]
Apply = Annotated[bool, typer.Option("--apply", help="Change it in the cluster with kubectl, else only show.")]


def onboard(
    target: Target,
    model: Annotated[str, typer.Option(help="What clients ask for; default: what its arguments name.")] = "",
    resource: Annotated[str, typer.Option(help="The seat; default: kyb.ai/gpu-Nx-seat for its N GPUs.")] = "",
    name: Annotated[str, typer.Option(help="Which of several Deployments of a file.")] = "",
    namespace: Namespace = "",
    apply: Apply = False,
) -> None:
    """Show the changes that make a Deployment of an LLM engine a seat, and what to expect; --apply makes them."""
    from kybernate.onboard import onboard as change

    def make(manifest: Json) -> tuple[Json, Json]:
        done = change(manifest, model, resource)
        return done.manifest, {"engine": done.engine, "backend": done.backend, "notes": [*done.notes]}

    _run(target, namespace, make, apply, name=name)


def adopt(
    target: Annotated[str, typer.Argument(metavar="service/NAME", help="A Service of the cluster.")],
    router: Annotated[str, typer.Option(help="The routers' Service there; default: by the chart's labels.")] = "",
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="Of the Service; default: kubectl's.")] = "",
    apply: Apply = False,
) -> None:
    """Show how an engine's Service leads to the routers of its namespace, so that its clients cannot hang at a parked
    engine; --apply changes it."""
    from kybernate.adopt import adopt as change

    if not target.startswith("service/"):
        raise CliError(f"{target}: give service/NAME", code=2)

    def make(manifest: Json) -> tuple[Json, Json]:
        others = json.loads(kubectl(["get", "services,pods", "-o", "json", *_in(namespace)]))["items"]
        after, notes = change(manifest, others, router)
        return after, {"notes": notes}

    _run(target, namespace, make, apply)


def _run(target: str, namespace: str, make: Callable[[Json], tuple[Json, Json]], apply: bool, name: str = "") -> None:
    import yaml

    from kybernate.onboard import OnboardError

    before = _read(target, namespace, name)
    try:
        after, facts = make(before)
    except OnboardError as error:
        raise CliError(str(error)) from None
    if as_json():
        print(json.dumps({**facts, "manifest": after}))
    else:
        old, new = (yaml.safe_dump(one, sort_keys=False).splitlines() for one in (before, after))
        print("\n".join(difflib.unified_diff(old, new, "now", "then", lineterm="")))
        for name in ("engine", "backend"):
            if name in facts:
                print(f"{name}: {facts[name]}")
        for note in facts["notes"]:
            print(f"- {note}")
    if apply:
        try:
            text = kubectl(*_written(target, namespace, before, after))
        except CliError:  # of a patch whose test fails the server says only that it is invalid
            if _read(target, namespace, "")["metadata"].get("generation") != before["metadata"].get("generation"):
                raise CliError(f"{target} was changed meanwhile, and nothing was written; try again") from None
            raise
        if not as_json():
            print(text.strip())


def _written(target: str, namespace: str, before: Json, after: Json) -> tuple[list[str], str]:
    """Arguments and input of the kubectl that writes. A workload is patched: its controller writes its status several
    times a second while it rolls out, and only a change of its spec is a conflict."""
    generation = before["metadata"].get("generation")
    if not target.startswith(LIVE) or generation is None:
        verb = "replace" if target.startswith(LIVE) else "apply"
        return [verb, "-f", "-", *_in(namespace)], json.dumps(after)
    patch = [
        {"op": "test", "path": "/metadata/generation", "value": generation},
        {"op": "replace", "path": "/spec", "value": after["spec"]},
    ]
    return ["patch", target, "--type=json", "--patch-file=/dev/stdin", *_in(namespace)], json.dumps(patch)


def _read(target: str, namespace: str, name: str) -> Json:
    """The object. Raises CliError."""
    import yaml

    from kybernate.files import read
    from kybernate.onboard import KINDS, WORKLOADS

    if target.startswith(LIVE):
        manifest: Json = json.loads(kubectl(["get", "-o", "json", target, *_in(namespace)]))
        manifest.pop("status", None)
        manifest["metadata"].pop("managedFields", None)
        return manifest
    try:
        documents = [one for one in yaml.safe_load_all(read(Path(target))) if one]
    except OSError as error:
        raise CliError(f"{target}: {error.strerror}; name a file, or deploy/NAME of the cluster", code=2) from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise CliError(f"{target}: cannot be read as YAML: {error}", code=2) from None
    found = [one for one in documents if isinstance(one, dict) and one.get("kind") in (*WORKLOADS, *KINDS)]
    names = [str((one.get("metadata") or {}).get("name")) for one in found]
    if name:
        found = [one for one, its in zip(found, names, strict=True) if its == name]
    if len(found) != 1:
        which = f"{len(found)} of {', '.join(names)}; choose one: --name NAME" if names else f"no {WORKLOADS[0]}"
        raise CliError(f"{target}: has {which}", code=2)
    return found[0]


def _in(namespace: str) -> list[str]:
    return ["-n", namespace] if namespace else []
