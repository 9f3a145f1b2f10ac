"""A node's configuration among several named ones: by the node's label ``kyb.ai/config``."""

import asyncio
from pathlib import Path

from kybernate.config import CONFIG_LABEL, NodeConfig, load, names
from kybernate.kube import Kube, KubeError, in_cluster
from kybernate.logs import OnceLogger

RETRY_SECONDS = 2.0


def label_decides(path: Path) -> bool:
    """True if the node's label must be read: there are several. Raises ConfigError."""
    return in_cluster() is not None and len(names(path)) > 1


async def load_now(path: Path, node: str, kube: Kube | None) -> NodeConfig:
    """Read the node's configuration: the one that its label names, where there are several; without the label
    ``default``. Raises ConfigError.

    Waits while the API server does not answer: a guess could give this node the groups of another one.
    """
    if kube is None or not await asyncio.to_thread(label_decides, path):
        return await asyncio.to_thread(load, path)
    waiting = OnceLogger("config.waiting_for_label")
    while True:
        try:
            labels = (await kube.node(node)).get("metadata", {}).get("labels") or {}
            return await asyncio.to_thread(load, path, labels.get(CONFIG_LABEL))
        except KubeError as error:
            waiting.log(label=CONFIG_LABEL, reason=str(error))
            await asyncio.sleep(RETRY_SECONDS)
