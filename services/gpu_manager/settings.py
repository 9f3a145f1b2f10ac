"""Settings of the GPU manager."""

from pathlib import Path
from typing import Literal

from kybernate.settings import NodeSettings


class ManagerSettings(NodeSettings):
    """What the manager of one node needs to know."""

    config: Path = Path("/etc/kybernate/config.yaml")
    """Profiles, groups and policy of this node: a file, or a folder of named configurations."""
    config_name: str = ""
    """Which of several named configurations; empty: as the node label kyb.ai/config says, else the default one."""
    gpus: Literal["nvml", "fake"] = "nvml"
    """Where the list of GPUs comes from."""
    pods: Literal["apiserver", "kubelet"] = "apiserver"
    """Where pods are read from."""
    kubelet_url: str = "https://127.0.0.1:10250"
    """Kubelet's HTTP address, for pods=kubelet."""
    pod_resources: Path = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
    """Kubelet's PodResources socket."""
    record_views: Path | None = None
    """A file that every view of the policy and its decision is written to; see ``kybernate.lab.simulate.replay``."""
