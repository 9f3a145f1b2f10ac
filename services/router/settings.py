"""Settings of a router, read from ``KYB_*``."""

from pydantic import Field

from kybernate.settings import Constants, ListenHost, OptionalFile, Settings, Url


class RouterConstants(Constants):
    """Values of a router that no environment sets. Durations are wall seconds."""

    caller_requests: int = 4096
    """Most requests of one API key at a time; further ones get a 429."""
    connections: int = 16384
    """Most open connections; further ones get a 503. The limit of open files can make it less."""
    address_connections: int = 12288
    """Most open connections of one address; further ones get a 429."""
    idle_seconds: float = 75.0
    """Time until the next request of a kept connection, else it is closed."""
    head_seconds: float = 15.0
    """Time for the head of a connection's first request, else 408."""
    body_seconds: float = 30.0
    """Time for a request body, plus 1 s for each 64 KiB of it, else 408."""
    slow_reader_seconds: float = 120.0
    """Time for a caller to read what waits for it, some 64 KiB, before more of its answer is sent; else it is cut."""
    first_byte_seconds: float = 600.0
    """Time for the first byte of an engine's answer; then the request is sent once more, then it gets a 504. It may be
    longer than KYB_HOLD_SECONDS, which counts waiting only."""
    silence_seconds: float = 120.0
    """Longest pause within an engine's answer; then the answer is broken off."""
    permit_seconds: float = 2.0
    """Validity of a permit of GET /v1/hold; parking waits until it expires."""
    queue_seconds: float = 3.0
    """Longest expected wait for a place at an active seat whose engine is full; further requests get a 429, except
    as many as the pod declares (at most 16)."""
    signals_per_second: float = 1000.0
    """Most signals of POST /v1/signals per second and caller, on average; further ones get a 429."""
    signal_sources: int = 500
    """Most sources that one caller's signals name at a time; further ones get a 429."""


class RouterSettings(RouterConstants, Settings):
    """Settings of a router. Durations are wall seconds unless model seconds are named."""

    host: ListenHost = "127.0.0.1"
    """Address of the OpenAI API."""
    port: int = Field(8780, ge=0, le=65535)
    """Port of the OpenAI API; 0 takes a free one."""
    health_port: int = Field(0, ge=0, le=65535)
    """Operations port: /metrics, /healthz and /readyz at KYB_HEALTH_HOST; 0: they are on the port of the API."""
    api_keys_file: OptionalFile = None
    """API keys and their scopes (YAML, kyb router keys); none: every caller may use every route."""
    tls_cert_file: OptionalFile = None
    """Certificate (PEM) of the port, which then speaks TLS only; its key is in the same file, or beside it in one that
    ends in .key."""
    advertise_url: Url = ""
    """URL of this router in its presence; empty: http://host:port."""
    hold_seconds: float = Field(300.0, gt=0)
    """Model seconds that a request may wait for its model before it gets a 503."""
    queue_limit: int = Field(2000, ge=0)
    """Most requests that wait for one model; further ones get a 429."""
    held_bytes: int = Field(256 * 2**20, ge=0)
    """Most bytes of request bodies and long heads in memory, until they are answered, and half of it
    for one API key, or one address where no keys are used; more get a 429."""
    body_bytes: int = Field(32 * 2**20, gt=0)
    """Largest request body; a larger one gets a 413."""
    aliases: str = ""
    """Further names of models, such as gpt-4o=llama,small=qwen: requests for gpt-4o go to llama, under its name."""
    engine_paths: str = ""
    """Further paths that are forwarded to engines, separated by commas, such as /v1/reconstruct,/v2/embed."""
    cors_origins: str = ""
    """Web pages that may use the router from a browser, such as https://chat.example, separated by commas; browsers may
    also use it under their host names. Others: only the router's own pages, under an address or localhost."""
    access_log: bool = False
    """One line in the log for each call, when it has ended."""
    keepalive_seconds: float = Field(0.0, ge=0)
    """Interval of SSE comments to a waiting stream, which commit a 200; 0: none."""
