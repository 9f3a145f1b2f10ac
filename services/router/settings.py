"""Settings of a router, read from ``KYB_*``."""

from pathlib import Path

from pydantic import Field, field_validator

from kybernate.settings import Settings


class RouterSettings(Settings):
    """What a router can be told. Durations are wall seconds unless they say model seconds."""

    host: str = "127.0.0.1"
    """Address of the OpenAI API; health and metrics answer on the same port."""
    port: int = Field(8780, ge=0, le=65535)
    """Port of the OpenAI API; 0 takes a free one."""
    api_keys_file: Path | None = None
    """Keys of callers and what they may (YAML, kyb router keys); none: everybody may everything."""
    tls_cert_file: Path | None = None
    """Certificate (PEM) of the port, which then speaks TLS only."""
    tls_key_file: Path | None = None
    """Private key (PEM) of that certificate; none: it is in the same file."""
    advertise_url: str = ""
    """How others reach this router; empty: http://host:port."""
    hold_seconds: float = Field(300.0, gt=0)
    """Model seconds that a request may wait for its model before it gets a 503."""
    queue_limit: int = Field(2000, ge=0)
    """Requests that may wait for one model; one more gets a 429."""
    held_bytes: int = Field(256 * 2**20, ge=0)
    """Bytes of waiting request bodies over all models; beyond it a request gets a 429."""
    body_bytes: int = Field(32 * 2**20, gt=0)
    """Largest request body; a larger one gets a 413."""
    permit_seconds: float = Field(2.0, gt=0)
    """How long a permission of GET /v1/hold is valid; parking waits for it."""
    wake_seconds: float = Field(60.0, gt=0)
    """Model seconds for which POST /v1/wake asks for a model."""
    keepalive_seconds: float = Field(0.0, ge=0)
    """A waiting stream gets an SSE comment each so many seconds, which commits a 200; 0: never."""
    signal_ttl_seconds: float = Field(15.0, gt=0)
    """How long a signal of POST /v1/signals holds when it does not say so itself."""

    @field_validator("api_keys_file", "tls_cert_file", "tls_key_file", mode="before")
    @classmethod
    def _not_set(cls, value: object) -> object:
        return None if value == "" else value
