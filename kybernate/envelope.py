"""The base of all messages: a subject made from the message's fields, a cause, and CloudEvents headers.

CloudEvents binary mode over NATS: attributes are headers ``ce-*``, the body is the JSON of the pydantic model.
Unknown fields in a body are ignored, so that a newer sender can talk to an older receiver.
"""

import functools
import hashlib
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

LONGEST_NAME = 512
"""Characters of a model's name, of a cause and of an address."""
Address = Annotated[str, Field(max_length=LONGEST_NAME, pattern=r"^(https?://[!-~]+)?$")]
"""Base URL of a service or an engine, as another one writes it; empty: it has none."""
_SLUG = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_TOKEN = re.compile(r"\{(\w+)\}")


@functools.lru_cache(maxsize=8192)
def slug(name: str) -> str:
    """Turn any name into a token of ``[a-z0-9-]``, for NATS subjects and bucket keys.

    A name that already is one stays as it is; any other gets its odd characters replaced by ``-`` and six hex
    digits of its SHA-256 appended, so that two names never share a token. Raises ValueError for an empty name.
    """
    if not name:
        raise ValueError("an empty name cannot become a subject token")
    if _SLUG.fullmatch(name):
        return name
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    digest = hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{plain}-{digest}" if plain else digest


class MessageError(Exception):
    """A received message cannot be read; the text says which subject and why."""


class Record(BaseModel):
    """Base of rows, and of what messages are made of. Fields that a newer writer adds are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Message(BaseModel):
    """Base of everything on the bus. A concrete message sets ``subject_template`` over its own fields."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    subject_template: ClassVar[str] = ""
    cloud_event: ClassVar[bool] = True
    """False for high-rate levels, which travel as plain JSON."""

    registry: ClassVar[dict[tuple[str, int, str | None], type["Message"]]] = {}

    id: str = Field(default_factory=functools.partial(secrets.token_hex, 16))
    """Unique per message; for events also the Nats-Msg-Id that deduplicates them."""
    cause: str
    """The id of the request or operator action that set this chain of messages in motion."""
    at: float = Field(default_factory=time.time)
    """When it was made, unix seconds."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if "subject_template" not in cls.__dict__ or not cls.subject_template:
            return
        for name in _TOKEN.findall(cls.subject_template):
            if name not in cls.model_fields:
                raise TypeError(f"{cls.__name__}: subject_template names {{{name}}}, which is no field")
        Message.registry[_registry_key(cls.subject_template)] = cls

    @property
    def subject(self) -> str:
        """The NATS subject of this message; names become slugs."""
        tokens, fields = _subject_parts(self.subject_template)
        return tokens % tuple(slug(str(getattr(self, field))) for field in fields)

    @classmethod
    @functools.cache
    def kind(cls) -> str:
        """The CloudEvents type: ``ai.kyb.v1.`` and the class name in kebab case."""
        return "ai.kyb.v1." + re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower()

    @classmethod
    def pattern(cls, **tokens: str) -> "Pattern[Self]":
        """A subscription to this kind; fields that are not given match anything.

        A base class without a template (``SeatEvent``) matches all of its subclasses.
        """
        template = cls.subject_template or _common_template(cls)
        unknown = set(tokens) - set(_TOKEN.findall(template))
        if unknown:
            raise TypeError(f"{cls.__name__}: {sorted(unknown)} are not in the subject {template!r}")
        subject = _TOKEN.sub(lambda m: slug(tokens[m[1]]) if m[1] in tokens else "*", template)
        return Pattern(subject, cls)

    def headers(self, source: str) -> dict[str, str]:
        """CloudEvents attributes as NATS headers; ``source`` names the sender, e.g. ``kyb/router/router-0``."""
        if not self.cloud_event:
            return {}
        return {
            "ce-specversion": "1.0",
            "ce-id": self.id,
            "ce-type": self.kind(),
            "ce-source": source,
            "ce-time": datetime.fromtimestamp(self.at, UTC).isoformat(timespec="microseconds"),
            "ce-datacontenttype": "application/json",
            "Nats-Msg-Id": self.id,
        }

    def body(self) -> bytes:
        """The JSON of this message."""
        return self.model_dump_json(exclude_none=True).encode()


M = TypeVar("M", bound=Message, covariant=True)


@dataclass(frozen=True, slots=True)
class Pattern(Generic[M]):
    """A NATS subject pattern and the kind of message that comes on it."""

    subject: str
    kind: type[M] = field(hash=False)
    last: Callable[[str], bool] | None = field(default=None, hash=False)
    """What else the last token must fulfil; None: nothing. Messages that do not are dropped before they are decoded."""

    def matches(self, subject: str) -> bool:
        """Whether a concrete subject falls under this pattern."""
        return _falls_under(self.subject, subject) and (self.last is None or self.last(subject.rpartition(".")[2]))


def decode(subject: str, data: bytes) -> Message:
    """Read a message from the wire. Raises MessageError when the subject is unknown, or the body does not fit it."""
    tokens = subject.split(".")
    family, length = tokens[2] if len(tokens) > 3 else subject, len(tokens)
    kind = Message.registry.get((family, length, tokens[-1])) or Message.registry.get((family, length, None))
    if kind is None:
        raise MessageError(f"{subject}: no message has this subject")
    try:
        message = kind.model_validate_json(data)
        named = message.subject
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "body"
        raise MessageError(f"{subject}: {kind.__name__}.{place}: {first['msg']}") from error
    except ValueError as error:  # an empty name
        raise MessageError(f"{subject}: {kind.__name__}: {error}") from error
    if named != subject:
        raise MessageError(f"{subject}: {kind.__name__} is of {named}")
    return message


@functools.lru_cache(maxsize=8192)
def _falls_under(pattern: str, subject: str) -> bool:
    want, have = pattern.split("."), subject.split(".")
    return len(want) == len(have) and all(w in ("*", h) for w, h in zip(want, have, strict=True))


@functools.cache
def _subject_parts(template: str) -> tuple[str, tuple[str, ...]]:
    """A template as a format with ``%s`` for each field, and these fields."""
    return _TOKEN.sub("%s", template), tuple(_TOKEN.findall(template))


def _registry_key(template: str) -> tuple[str, int, str | None]:
    tokens = template.split(".")
    return tokens[2], len(tokens), None if tokens[-1].startswith("{") else tokens[-1]


def _common_template(cls: type[Message]) -> str:
    """The template that covers every concrete kind below ``cls``."""
    below = [k.subject_template for k in Message.registry.values() if issubclass(k, cls)]
    if not below:
        raise TypeError(f"{cls.__name__} has no subject and no kinds below it")
    columns = zip(*(template.split(".") for template in below), strict=True)
    return ".".join(tokens[0] if len(set(tokens)) == 1 else "*" for tokens in columns)
