"""Rendering the chart with a real helm, and reading what it made."""

import functools
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "kybernate"
KUBE_VERSION = "1.36.0"
"""A helm made by ``go install`` believes in a very old Kubernetes."""
NAMESPACE = "kyb-test"
SETS = {path.name.removesuffix("-values.yaml"): path for path in sorted((CHART / "ci").glob("*-values.yaml"))}
"""Value sets that must work, by name."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Container:
    """One container of a pod of the chart."""

    where: str
    spec: Json
    pod: Json
    """The pod's spec."""
    serves: bool
    """Runs as long as the pod."""

    @property
    def env(self) -> dict[str, str]:
        """Its variables as the pod ``p-0`` on node ``n1`` has them, with an address of this machine."""
        fields = {
            "status.podIP": "::1" if "[$(POD_IP)]" in str(self.spec.get("env")) else "127.0.0.7",
            "spec.nodeName": "n1",
            "metadata.name": "p-0",
            "metadata.namespace": NAMESPACE,
        }
        found: dict[str, str] = {}
        for one in self.spec.get("env", ()):
            value = one["value"] if "value" in one else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
            for name, before in found.items():
                value = value.replace(f"$({name})", before)
            found[one["name"]] = value
        return found


@dataclass(frozen=True)
class Rendered:
    """All objects of one value set."""

    objects: list[Json]

    def kind(self, kind: str) -> list[Json]:
        """Objects of a kind."""
        return [one for one in self.objects if one["kind"] == kind]

    def one(self, kind: str, ending: str) -> Json:
        """The object of a kind whose name ends so."""
        (found,) = (one for one in self.kind(kind) if one["metadata"]["name"].endswith(ending))
        return found

    def pods(self) -> Iterator[tuple[str, Json]]:
        """(kind/name, pod template or pod) of everything that runs."""
        for one in self.objects:
            where = f"{one['kind']}/{one['metadata']['name']}"
            if one["kind"] == "Pod":
                yield where, one
            elif "template" in one.get("spec", {}):
                yield where, one["spec"]["template"]

    def containers(self) -> Iterator[Container]:
        """All containers."""
        for where, pod in self.pods():
            spec = pod["spec"]
            long = where.split("/")[0] in ("DaemonSet", "Deployment", "StatefulSet")
            for one in spec.get("initContainers", ()):
                yield Container(f"{where}/{one['name']}", one, spec, one.get("restartPolicy") == "Always")
            for one in spec["containers"]:
                yield Container(f"{where}/{one['name']}", one, spec, long)

    def container(self, name: str) -> Container:
        """The container of this name."""
        (found,) = (one for one in self.containers() if one.spec["name"] == name)
        return found


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run helm."""
    tool = Path(os.environ["HELM_TEST_TOOLS"]) / "helm"
    return subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=50, check=False, cwd=ROOT)


def template(*arguments: str, release: str = "kyb") -> subprocess.CompletedProcess[str]:
    """``helm template`` with these values."""
    return helm("template", release, str(CHART), "--kube-version", KUBE_VERSION, "--namespace", NAMESPACE, *arguments)


@functools.cache
def manifest(*arguments: str, release: str = "kyb") -> str:
    """The objects as text; a value set by its name or ``--set=…``. Fails on any warning."""
    given = [word for one in arguments for word in (("--values", str(SETS[one])) if one in SETS else (one,))]
    done = template(*given, release=release)
    assert done.returncode == 0, done.stderr
    assert not done.stderr.strip(), f"a warning: {done.stderr}"
    return done.stdout


@functools.cache
def render(*arguments: str, release: str = "kyb") -> Rendered:
    """The objects; as ``manifest``."""
    loaded = yaml.load_all(manifest(*arguments, release=release), yaml.CSafeLoader)
    return Rendered([one for one in loaded if one])
