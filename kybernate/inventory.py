"""The GPUs of the nodes: the bucket ``kyb_inventory``. Each node's device plugin writes its rows.

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
    """UUID; for a missing GPU the name that the configuration uses."""
    index: int
    """Host index; -1 where unknown."""
    name: str = ""
    memory_bytes: int = 0
    numa_node: int | None = None
    groups: tuple[str, ...] = ()
    """Groups that contain it."""
    healthy: bool = True
    """False: no seat of these groups is allocated; pods that have one keep running."""
    reason: str = ""
    """Why it is not healthy."""
    since: float = Field(default=0.0)
    """Unix seconds of the last health change that the plugin knows."""

    @property
    def key(self) -> str:
        """Key in the bucket."""
        return f"{slug(self.node)}.{slug(self.gpu)}"
