"""Settings of a process: read once from ``KYB_*`` in the environment, frozen, passed down.

A name that no service knows is fatal, with the name in the text, so that a typo never becomes a default.
"""

import contextlib
import difflib
import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo

from kybernate.addresses import address
from kybernate.bus.credentials import Credentials, CredentialsError
from kybernate.files import NO_FILE

PREFIX = "KYB_"
NATS_SCHEMES = ("nats://", "tls://", "ws://", "wss://")
EMPTY_IS_NONE = BeforeValidator(lambda value: None if value == "" else value)
"""For optional settings that a chart or a shell may set to an empty text."""
LONGEST_RUN_DIR = 107 - len("/checkpointer.sock")
"""In bytes: what Linux takes as the path of a socket."""


def _readable(path: Path | None) -> Path | None:
    if path is not None and os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise ValueError(NO_FILE)  # its reader would wait for ever
    return path


Url = Annotated[str, AfterValidator(lambda url: url and address(url))]
"""Of an HTTP server; empty: none."""
OptionalFile = Annotated[Path | None, EMPTY_IS_NONE, AfterValidator(_readable)]


def listening(host: str) -> str:
    """An address at which this machine can listen; empty: all. Raises ValueError with the remedy for another one.

    As asyncio does, it leaves out addresses of a family that the kernel lacks, if a name has another one.
    """
    bound, lacking = False, None
    try:
        for *of, _, place in socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE):
            try:
                probe = socket.socket(*of)
            except OSError as error:
                lacking = error
                continue
            with probe:
                probe.bind(place)
            bound = True
        if lacking and not bound:
            raise lacking
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        text = f"this machine cannot listen there ({why}): give an address of it, 127.0.0.1 (callers on it alone), or "
        raise ValueError(f"{text}0.0.0.0 (all)") from None
    return host


ListenHost = Annotated[str, AfterValidator(listening)]


class SettingsError(Exception):
    """The environment has a wrong or unknown setting; the text names it and the remedy."""


def known_options() -> list[dict[str, str]]:
    """Every option of the product: its ``kind``, ``name``, ``default``, ``unit`` and ``text``."""
    found: list[dict[str, str]] = json.loads((Path(__file__).parent / "config" / "options.json").read_text())
    return found


@contextlib.contextmanager
def refused(program: str, *kinds: type[Exception]) -> Iterator[None]:
    """End a program with code 2 and the text of such an error: what it was given cannot be used."""
    try:
        yield
    except kinds as error:
        sys.stderr.write(f"{program}: {error}\n")
        raise SystemExit(2) from None


class Constants(BaseModel):
    """Base of a service's values that no environment sets. They are fields, so that tests may have shorter times."""


class Settings(BaseModel):
    """Base of each service's settings; field ``nats_url`` is read from ``KYB_NATS_URL``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    elsewhere: ClassVar[frozenset[str]] = frozenset({"KYB_URL", "KYB_API_KEY_FILE"})
    """Names of the command line's settings, which a user's shell may have."""

    node: str = Field(default_factory=socket.gethostname, min_length=1)
    """Name of this machine, as Kubernetes knows it."""
    instance: str = Field(default_factory=socket.gethostname, min_length=1)
    """Stable name of this instance of the service, e.g. router-0."""
    nats_url: str = "nats://127.0.0.1:4222"
    """The cluster bus."""
    nats_creds_file: OptionalFile = None
    """Seed of this service's key on the cluster bus (.nk), or for a NATS in operator mode its user's JWT and seed
    (.creds); none: the bus requires no key."""
    nats_ca_file: OptionalFile = None
    """Authority of NATS' certificate (PEM); with it a server without TLS is refused."""
    nats_cert_file: OptionalFile = None
    """This service's certificate (PEM), for a NATS that verifies its clients; its key is in the same file, or beside it
    in one that ends in .key."""
    speed: float = Field(default=1.0, gt=0)
    """Model seconds per wall second; above 1 only with the fakes."""
    log_format: Literal["auto", "json", "pretty"] = "auto"
    """auto: pretty on a terminal, JSON elsewhere."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least important level that is written."""
    health_host: ListenHost = "127.0.0.1"
    """Address of /healthz, /readyz and /metrics."""
    health_port: int = Field(default=0, ge=0, le=65535)
    """Port of /healthz, /readyz and /metrics; 0 takes a free one."""

    @field_validator("nats_url")
    @classmethod
    def _of_nats(cls, url: str) -> str:
        if not url.startswith(NATS_SCHEMES):
            raise ValueError(f"begins with none of {', '.join(NATS_SCHEMES)}")
        return url

    @classmethod
    def options(cls) -> dict[str, FieldInfo]:
        """The fields that the environment sets: all but constants."""
        fixed = {name for base in cls.__mro__ if Constants in base.__bases__ for name in base.__annotations__}
        return {name: info for name, info in cls.model_fields.items() if name not in fixed}

    def credentials(self, role: str) -> Credentials:
        """This process' credentials on the cluster bus, in this role."""
        return Credentials(role, self.nats_creds_file, self.nats_ca_file, self.nats_cert_file)

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Self:
        """Read the environment. Raises SettingsError naming the variable, its value and the remedy."""
        env = os.environ if env is None else env
        known = {PREFIX + name.upper(): name for name in cls.options()}
        given: dict[str, Any] = {}
        for variable, value in env.items():
            if not variable.startswith(PREFIX) or variable in cls.elsewhere:
                continue
            if variable not in known:
                close = difflib.get_close_matches(variable, known, n=1)
                hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(known))}"
                raise SettingsError(f"unknown setting {variable}={value!r}; {hint}")
            if not value and cls.options()[known[variable]].annotation is Path:
                raise SettingsError(f"{variable}='': is no path; give one, or do not set it")  # Path("") is here
            given[known[variable]] = value
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = PREFIX + str(first["loc"][0]).upper() if first["loc"] else "environment"
            own = first["type"] == "value_error"
            from kybernate.config_errors import wrong_kind  # needs PyYAML, which the GPU bench does without

            what = first["msg"].removeprefix("Value error, ") if own else "; ".join(wrong_kind(first))
            raise SettingsError(f"{name}={first['input']!r}: {what}") from error

    @classmethod
    def from_env_or_exit(cls, program: str) -> Self:
        """For ``main``: ``--help`` prints the table of settings; a wrong setting ends the process with code 2."""
        if any(arg in ("-h", "--help") for arg in sys.argv[1:]):
            sys.stdout.write(f"{program}: settings are read from the environment\n\n{cls.describe()}")
            raise SystemExit(0)
        if sys.argv[1:]:
            sys.stderr.write(f"{program}: {sys.argv[1]!r}: takes no arguments, only KYB_* variables; see --help\n")
            raise SystemExit(2)
        with refused(program, SettingsError, CredentialsError):
            settings = cls.from_env()
            settings.credentials("").read()  # what is wrong with them is said before anything is opened
        return settings

    @classmethod
    def describe(cls) -> str:
        """One line per setting: variable, default, meaning."""
        lines, texts = [], {option["name"]: option["text"] for option in known_options()}
        for name, info in cls.options().items():
            value = info.get_default()
            default = "(host name)" if info.default_factory else str(value) if isinstance(value, Path) else repr(value)
            lines.append(f"  {PREFIX + name.upper():32} {default:28} {texts.get(PREFIX + name.upper(), '')}\n")
        return "".join(lines)


class NodeSettings(Settings):
    """Settings that the services of a GPU node share."""

    run_dir: Path = Path("/run/kybernate")
    """Seat folders, locks, and the socket between manager and checkpointer; emptied by a reboot. The same for all
    services of the node; at most 89 bytes."""
    state_dir: Path = Path("/var/lib/kybernate")
    """Ledger, journal, known GPUs; survives a reboot. The same for all services of the node."""
    fake_driver: Annotated[Path | None, EMPTY_IS_NONE] = None
    """Socket of the fake GPU driver; set only with the fakes."""
    driver: Annotated[Literal["cuda", "fake"] | None, EMPTY_IS_NONE] = None
    """GPUs and driver: cuda (NVML and CUDA of this machine) or fake (at KYB_FAKE_DRIVER); empty: fake where
    KYB_FAKE_DRIVER is set, else cuda."""

    @property
    def fakes(self) -> bool:
        """Whether GPUs and their driver are fake."""
        return self.driver == "fake" or (self.driver is None and self.fake_driver is not None)

    @property
    def helpers_dir(self) -> Path:
        """Has a file ``<pid>-<start time>`` for each of the checkpointer's helpers, which open every GPU."""
        return self.state_dir / "helpers"

    @property
    def node_socket(self) -> Path:
        """Where the checkpointer listens for the manager."""
        return self.run_dir / "checkpointer.sock"

    @field_validator("run_dir")
    @classmethod
    def _has_room_for_a_socket(cls, path: Path) -> Path:
        if len(os.fsencode(path)) > LONGEST_RUN_DIR:
            raise ValueError(f"longer than {LONGEST_RUN_DIR} bytes: Linux takes no longer path of the socket in it")
        return path


class GroupSettings(NodeSettings):
    """What device plugin and manager read alike: both form the node's groups from it."""

    config: Path = Path("/etc/kybernate/config.yaml")
    """Profiles, groups and policy of this node: a file, or a folder of named configurations, of which the node's label
    kyb.ai/config names one."""
    kubelet_dir: Path = Path("/var/lib/kubelet")
    """Kubelet's folder, with device-plugins/kubelet.sock and pod-resources/kubelet.sock."""

    @property
    def pod_resources(self) -> Path:
        """Kubelet's PodResources socket, which lists the allocated seats."""
        return self.kubelet_dir / "pod-resources" / "kubelet.sock"

    @property
    def ledger(self) -> Path:
        """The manager's ledger. The plugin offers no seat before it exists: a manager without a ledger that finds an
        allocated seat has lost it, then, and fears a ticket that it does not remember."""
        return self.state_dir / "ledger"
