"""Settings of the device plugin, read from ``KYB_*``."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from kybernate.settings import NodeSettings


class PluginSettings(NodeSettings):
    """Settings of the device plugin. Durations are wall seconds."""

    config: Path = Path("/etc/kybernate/config.yaml")
    """Profiles and groups of this node: a file, or a folder of named configurations."""
    config_name: str = ""
    """Which of several named configurations; empty: the node label kyb.ai/config decides, else the default one."""
    device_plugin_dir: Path = Path("/var/lib/kubelet/device-plugins")
    """Kubelet's device plugin folder, with kubelet.sock and the plugin's sockets."""
    pod_resources: Path = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
    """Kubelet's PodResources socket, which lists the allocated seats."""
    cdi_dir: Path = Path("/var/run/cdi")
    """Folder of the CDI spec of the groups, when CDI is used."""
    gpus: Literal["nvml", "fake"] = "nvml"
    """Source of the GPU readings."""
    neighbours: Literal["refuse", "ignore"] = "refuse"
    """Whether to refuse to register while NVIDIA's device plugin or DRA driver offers this node's GPUs."""
    gate_seconds: float = Field(25.0, gt=0, le=28)
    """How long a container start waits for its ticket; kubelet's deadline is 30 s."""
    reread_seconds: float = Field(10.0, gt=0)
    """Interval of GPU readings; a missing GPU makes its seats unhealthy."""
