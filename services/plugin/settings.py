"""Settings of the device plugin, read from ``KYB_*``."""

from pathlib import Path
from typing import Literal

from kybernate.settings import Constants, GroupSettings


class PluginConstants(Constants):
    """Values of the device plugin that no environment sets, in wall seconds."""

    gate_seconds: float = 25.0
    """How long a container start waits for its ticket; kubelet's deadline is 30 s."""
    reread_seconds: float = 10.0
    """Interval of GPU readings; a missing GPU makes its seats unhealthy."""


class PluginSettings(PluginConstants, GroupSettings):
    """Settings of the device plugin."""

    cdi_dir: Path = Path("/var/run/cdi")
    """Folder of the CDI spec of the groups, when CDI is used."""
    neighbours: Literal["refuse", "ignore"] = "refuse"
    """Whether to refuse to register while NVIDIA's device plugin or DRA driver offers this node's GPUs."""

    @property
    def device_plugin_dir(self) -> Path:
        """Kubelet's device plugin folder, with kubelet.sock and the plugin's sockets."""
        return self.kubelet_dir / "device-plugins"

    @property
    def bin_dir(self) -> Path:
        """Host folder with ``kyb-run``, which each container with a seat gets; not below run_dir, which may be mounted
        noexec."""
        return self.state_dir / "bin"
