"""Settings of the webhook, read from ``KYB_*``."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from kybernate.settings import EMPTY_IS_NONE, ListenHost, OptionalFile, Settings


class WebhookSettings(Settings):
    """Settings of the webhook."""

    host: ListenHost = "127.0.0.1"
    """Address of the webhook."""
    port: int = Field(9443, ge=0, le=65535)
    """Port of the webhook, HTTPS; 0 takes a free one."""
    tls_cert_file: Path = Path("/etc/kybernate/tls/tls.crt")
    """Certificate (PEM) of that port, and tls.key beside it; read again when they change."""
    probe_image: str = "kybernate"
    """Image of the container kyb-probe."""
    probe_user: Annotated[int | None, EMPTY_IS_NONE] = Field(65532, ge=1)
    """User id of kyb-probe; empty where namespaces assign it (OpenShift)."""
    stop_hook: bool = False
    """Let engines be checkpointed before kubelet signals them (preStop): for nodes with driver 595 and the open kernel
    module, where the end of a once restored process can hang the machine."""
    manager_port: int = Field(9471, ge=0, le=65535)
    """Port of the GPU managers on their hosts; 0: none, so kyb-probe cannot distinguish parked engines from others."""
    config: OptionalFile = None
    """Configurations of the nodes (a file or a folder): their resources are seats, as those of kyb.ai/, and pods that
    name an unknown resource, tier or group are refused; none: these names are not checked."""
