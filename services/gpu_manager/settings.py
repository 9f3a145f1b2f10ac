"""Settings of the GPU manager."""

from pathlib import Path
from typing import Literal

from kybernate.settings import GroupSettings


class ManagerSettings(GroupSettings):
    """What the manager of one node needs to know."""

    pods: Literal["apiserver", "kubelet"] = "apiserver"
    """Where pods are read from."""
    kubelet_url: str = "https://127.0.0.1:10250"
    """Kubelet's HTTP address, for pods=kubelet."""
    pod_events: bool = True
    """In a cluster: create Kubernetes Events on the pods of seats."""
    pod_conditions: bool = False
    """In a cluster: keep the condition ``kyb.ai/Active`` in the status of the pods of seats."""
    record_views: Path | None = None
    """A file that every view of the policy and its decision is written to; see ``kybernate.lab.simulate.replay``."""
