"""The GPUs of the nodes: the bucket ``kyb_inventory``. Written by each node's device plugin, read by everyone.

Keys are ``<node>.<gpu UUID>`` as slugs; values are the JSON of GpuRecord.
"""

from pydantic import BaseModel, ConfigDict, Field

from kybernate.slugs import slug

BUCKET = "kyb_inventory"


class GpuRecord(BaseModel):
    """One GPU of a node."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    node: str
    gpu: str
    """UUID; of a GPU that is missing, what the configuration calls it."""
    index: int
    """Host index; -1 where nobody knows it."""
    name: str = ""
    memory_bytes: int = 0
    numa_node: int | None = None
    groups: tuple[str, ...] = ()
    """Groups that contain it."""
    healthy: bool = True
    """False: no seat of these groups is offered; pods that have one go on."""
    reason: str = ""
    """Why it is not healthy."""
    since: float = Field(default=0.0)
    """Unix seconds since which it is as it is, as far as the plugin knows."""

    @property
    def key(self) -> str:
        """Key in the bucket."""
        return f"{slug(self.node)}.{slug(self.gpu)}"
