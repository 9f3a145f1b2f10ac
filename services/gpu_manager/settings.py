"""Settings of the GPU manager."""

from kybernate.settings import GroupSettings, Url


class ManagerSettings(GroupSettings):
    """What the manager of one node needs to know."""

    kubelet_url: Url = ""
    """Kubelet's HTTP address, where pods are read without an API server; empty: from the API server."""
    pod_conditions: bool = False
    """In a cluster: keep condition ``kyb.ai/Active`` and label ``kyb.ai/state`` of the pods of seats."""
