"""Settings of the device plugin, read from ``KYB_*``."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from kybernate.settings import NodeSettings


class PluginSettings(NodeSettings):
    """What the device plugin can be told. Durations are wall seconds."""

    config: Path = Path("/etc/kybernate/config.yaml")
    """Profiles and groups of this node: a file, or a folder of named configurations."""
    config_name: str = ""
    """Which of several named configurations; empty: as the node label kyb.ai/config says, else the default one."""
    device_plugin_dir: Path = Path("/var/lib/kubelet/device-plugins")
    """Kubelet's device plugin folder: kubelet.sock is there, and the plugin's own sockets."""
    pod_resources: Path = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
    """Kubelet's PodResources socket, which tells the seats in use."""
    cdi_dir: Path = Path("/var/run/cdi")
    """Where the CDI spec of the groups goes, when CDI is used."""
    gpus: Literal["nvml", "fake"] = "nvml"
    """Where the GPUs come from."""
    neighbours: Literal["refuse", "ignore"] = "refuse"
    """What to do when NVIDIA's device plugin or DRA driver offers this node's GPUs, too."""
    gate_seconds: float = Field(25.0, gt=0, le=28)
    """How long a container start waits for its ticket; kubelet gives up after 30."""
    reread_seconds: float = Field(10.0, gt=0)
    """How often the GPUs are looked at again; one that is gone makes its seats unhealthy."""
