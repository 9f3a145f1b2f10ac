"""Settings of the console, read from ``KYB_*``."""

from pydantic import Field

from kybernate.settings import ListenHost, OptionalFile, Settings, Url


class ConsoleSettings(Settings):
    """Settings of the console."""

    host: ListenHost = "127.0.0.1"
    """Address of the operators' API."""
    port: int = Field(8781, ge=0, le=65535)
    """Port of the operators' API; 0 takes a free one."""
    health_port: int = Field(0, ge=0, le=65535)
    """Operations port at KYB_HEALTH_HOST: the page below /ui, /metrics, /healthz, /readyz. 0: all of them are on the
    port of the API, the page only where no keys are needed."""
    api_keys_file: OptionalFile = None
    """API keys and their scopes, the file of the routers; none: every caller may use every route."""
    tls_cert_file: OptionalFile = None
    """Certificate (PEM) of the port, which then speaks TLS only; its key is in the same file, or beside it in one that
    ends in .key."""
    cors_origins: str = ""
    """Pages that may read the console and command, and names under which browsers reach it, such as
    https://console.example, with commas between."""
    router_url: Url = ""
    """Router that the page's playground reaches, with the key of its caller; empty: it reaches none."""
    router_ca_file: OptionalFile = None
    """Authority (PEM) of the routers' certificate, or that certificate; trusted beside those of the machine."""
