"""Settings of the device plugin, read from ``KYB_*``."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from kybernate.settings import NodeSettings


class PluginSettings(NodeSettings):
    """What the device plugin can be told. Durations are wall seconds."""

    config: Path = Path("/etc/kybernate/config.yaml")
    """Profiles and groups of this node."""
    device_plugin_dir: Path = Path("/var/lib/kubelet/device-plugins")
    """Kubelet's device plugin folder: kubelet.sock is there, and the plugin's own sockets."""
    gpus: Literal["nvml", "fake"] = "nvml"
    """Where the GPUs come from."""
    gate_seconds: float = Field(25.0, gt=0, le=28)
    """How long a container start waits for its ticket; kubelet gives up after 30."""
    reread_seconds: float = Field(10.0, gt=0)
    """How often the GPUs are looked at again; one that is gone makes its seats unhealthy."""
