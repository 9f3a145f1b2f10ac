"""How a fake kubelet differs from one in a cluster."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kybernate.dev.fakes.kubelet.container import BackOff
from kybernate.dev.fakes.kubelet.device_manager import Topology


@dataclass(frozen=True, slots=True)
class Options:
    """How this kubelet differs from one in a cluster. Wall seconds."""

    folder: Path
    """The device plugin folder."""
    run_dir: Path
    """Seat folders (made by the plugin), and logs of pods under ``pods/``."""
    node: str = "node-0"
    node_address: str = "127.0.0.1"
    """The node's own address: hostIP of all pods, podIP of those with ``hostNetwork: true``."""
    speed: float = 1.0
    inject: Mapping[str, str] = field(default_factory=dict)
    """Put into every container, as a runtime's hook does; a pod's own variables come after it."""
    grace_seconds: float = 300.0
    """How long the capacity of a stopped plugin stays."""
    backoff: BackOff = field(default_factory=BackOff)
    readmit_seconds: float = 1.0
    """After a restart: how long plugins have to come back before pods that do not run are admitted again.

    Real kubelets give none, so that such pods often fail; 0 does the same.
    """
    topology: Topology = field(default_factory=Topology)
    seed: int | None = None
