"""Settings of a router, read from ``KYB_*``."""

from pydantic import Field

from kybernate.settings import OptionalFile, Settings


class RouterSettings(Settings):
    """Settings of a router. Durations are wall seconds unless model seconds are named."""

    host: str = "127.0.0.1"
    """Address of the OpenAI API; health and metrics answer on the same port."""
    port: int = Field(8780, ge=0, le=65535)
    """Port of the OpenAI API; 0 takes a free one."""
    api_keys_file: OptionalFile = None
    """API keys and their scopes (YAML, kyb router keys); none: every caller may use every route."""
    tls_cert_file: OptionalFile = None
    """Certificate (PEM) of the port, which then speaks TLS only."""
    tls_key_file: OptionalFile = None
    """Private key (PEM) of that certificate; none: it is in the certificate's file."""
    advertise_url: str = ""
    """URL of this router in its presence; empty: http://host:port."""
    hold_seconds: float = Field(300.0, gt=0)
    """Model seconds that a request may wait for its model before it gets a 503."""
    queue_limit: int = Field(2000, ge=0)
    """Most requests that wait for one model; further ones get a 429."""
    held_bytes: int = Field(256 * 2**20, ge=0)
    """Most bytes of waiting request bodies over all models; further requests get a 429."""
    body_bytes: int = Field(32 * 2**20, gt=0)
    """Largest request body; a larger one gets a 413."""
    permit_seconds: float = Field(2.0, gt=0)
    """Validity of a permit of GET /v1/hold; parking waits until it expires."""
    wake_seconds: float = Field(60.0, gt=0)
    """Model seconds for which POST /v1/wake requests a model."""
    keepalive_seconds: float = Field(0.0, ge=0)
    """Interval of SSE comments to a waiting stream, which commit a 200; 0: none."""
    signal_ttl_seconds: float = Field(15.0, gt=0)
    """Validity of a signal of POST /v1/signals that names none."""
