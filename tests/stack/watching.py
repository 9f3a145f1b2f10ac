"""``python watching.py URL ACCOUNT``: a GPU manager of a stack that watches its pods at a test's API server, as in a
cluster, and does not read them from kubelet."""

import sys
from collections.abc import Iterable
from pathlib import Path

from kybernate.kube import Kube
from kybernate.topology import Group
from services.gpu_manager import __main__ as service
from services.gpu_manager.pods import ApiServerPods, Pods, wishes_matter
from services.gpu_manager.settings import ManagerSettings

ACCOUNT, URL = Path(sys.argv.pop()), sys.argv.pop()


class WatchedPods(ApiServerPods):
    """Has its own client."""

    async def close(self) -> None:
        await super().close()
        await self._kube.close()


def watched(settings: ManagerSettings, groups: Iterable[Group], _: Kube | None) -> Pods:
    """The source of pods."""
    return WatchedPods(Kube(URL, ACCOUNT), settings.node, settings.pod_resources, wishes=wishes_matter(groups))


service.open_pods = watched
service.main()
