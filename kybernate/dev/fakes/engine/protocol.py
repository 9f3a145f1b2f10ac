"""OpenAI's shapes: requests read and checked, answers, stream chunks and errors built. No I/O.

An answer is a function of model, prompt and number of tokens, so that any mix-up shows. Standard library only: load
generators compare answers with it.
"""

import base64
import hashlib
import json
import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DEFAULT_TOKENS = 32
"""Length of an answer to a request that names none."""
DIMENSIONS = 32
"""Length of an embedding."""
_RIMES = ("a", "e", "i", "o", "u", "an", "en", "in", "on", "un", "ar", "er", "or", "al", "el", "ol")
_WORDS = [onset + rime for onset in "bdfghklmnprstvwz" for rime in _RIMES]


def expected_text(model: str, prompt: str, tokens: int) -> str:
    """The whole answer. A longer answer begins with the shorter one."""
    return "".join(answer_tokens(model, prompt, tokens))


def answer_tokens(model: str, prompt: str, tokens: int) -> list[str]:
    """The answer's tokens: words, from the second on with a blank before."""
    words = [_WORDS[byte] for byte in _bytes(model, prompt, tokens)]
    return [word if place == 0 else f" {word}" for place, word in enumerate(words)]


def chat_prompt(messages: Sequence[dict[str, Any]]) -> str:
    """The prompt that a chat stands for: a single message's text, several as ``role: text`` lines."""
    texts = [_content_text(message.get("content")) for message in messages]
    if len(texts) == 1:
        return texts[0]
    return "\n".join(f"{message.get('role', '')}: {text}" for message, text in zip(messages, texts, strict=True))


def prompt_tokens(prompt: str) -> int:
    """How many tokens a prompt has: one for each four characters begun, at least one."""
    return max(1, -(-len(prompt) // 4))


def expected_embedding(model: str, text: str) -> list[float]:
    """The embedding of a text: DIMENSIONS numbers that a float32 holds exactly."""
    return [(byte - 128) / 128 for byte in _bytes(model, text, DIMENSIONS)]


def embedding_base64(vector: Sequence[float]) -> str:
    """Little-endian float32s, as ``encoding_format: base64`` wants them."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def _bytes(model: str, text: str, count: int) -> bytes:
    return hashlib.shake_256(f"{model}\0{text}".encode("utf-8", "surrogatepass")).digest(count)


def _content_text(content: Any) -> str:
    if isinstance(content, list):  # parts; others than text do not change the answer
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


Json = dict[str, Any]


class ApiError(Exception):
    """A request is refused; ``status`` is the HTTP status."""

    def __init__(self, status: int, kind: str, text: str, param: str | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.body = {"error": {"message": text, "type": kind, "param": param, "code": status}}


@dataclass(frozen=True, slots=True)
class Generation:
    """A checked request for text."""

    id: str
    chat: bool
    model: str
    prompts: tuple[str, ...]
    tokens: int
    limited: bool
    """Whether the request named the length: then it ends by ``length``, else by ``stop``."""
    stream: bool
    include_usage: bool
    garbled: bool = False
    """Computed with wrong weights: other tokens."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(prompt_tokens(prompt) for prompt in self.prompts)

    @property
    def finish_reason(self) -> str:
        """Why the answer ends."""
        return "length" if self.limited else "stop"

    @property
    def usage(self) -> Json:
        """Token counts of the whole answer."""
        answered = self.tokens * len(self.prompts)
        total = self.prompt_tokens + answered
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": answered, "total_tokens": total}

    def pieces(self, index: int, chunks: int) -> Iterator[tuple[int, str]]:
        """The answer to prompt ``index`` in at most ``chunks`` parts: (tokens, text)."""
        model = f"{self.model} garbled" if self.garbled else self.model
        tokens = answer_tokens(model, self.prompts[index], self.tokens)
        count = min(chunks, len(tokens))
        for part in range(count):
            piece = tokens[part * len(tokens) // count : (part + 1) * len(tokens) // count]
            yield len(piece), "".join(piece)


def read_json(body: bytes) -> Any:
    """A request's body. Raises ApiError."""
    try:
        return json.loads(body)
    except ValueError as error:
        raise _bad(f"the body is not JSON: {error}") from error


def read_generation(body: Any, *, model: str, chat: bool, id: str, max_model_len: int) -> Generation:  # noqa: A002
    """Check a body of /v1/chat/completions or /v1/completions. Raises ApiError."""
    body = read_body(body, model)
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise _bad(f"max_tokens must be at least 1, got {limit!r}.", "max_tokens")
    if body.get("n") not in (None, 1):
        raise _bad("the fake engine answers n=1 only.", "n")
    generation = Generation(
        id=id,
        chat=chat,
        model=model,
        prompts=(_chat_prompt(body),) if chat else _prompts(body),
        tokens=limit or DEFAULT_TOKENS,
        limited=limit is not None,
        stream=bool(body.get("stream")),
        include_usage=bool((body.get("stream_options") or {}).get("include_usage")),
    )
    wanted = max(map(prompt_tokens, generation.prompts)) + generation.tokens
    if wanted > max_model_len:
        text = f"This model's maximum context length is {max_model_len} tokens. However, you requested {wanted} tokens."
        raise _bad(text, "max_tokens")
    return generation


def read_body(body: Any, model: str) -> Json:
    """An object that names the served model. Raises ApiError."""
    if not isinstance(body, dict):
        raise _bad("the body must be a JSON object.")
    named = body.get("model")
    if not isinstance(named, str):
        raise _bad("you must provide a model parameter", "model")
    if named != model:
        raise ApiError(404, "NotFoundError", f"The model `{named}` does not exist.", "model")
    return body


def read_inputs(body: Json, name: str) -> tuple[str, ...]:
    """A text, a list of texts, or token numbers; each text on its own. Raises ApiError."""
    value = body.get(name)
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if all(isinstance(one, str) for one in value):
            return tuple(value)
        if all(isinstance(one, int) for one in value):
            return (" ".join(map(str, value)),)
        if all(isinstance(one, list) for one in value):
            return tuple(" ".join(map(str, one)) for one in value)
    raise _bad(f"{name} must be a text, a list of texts, or token numbers.", name)


def whole(generation: Generation, texts: Mapping[int, str]) -> Json:
    """The answer in one piece; ``texts`` by prompt, a prompt without one was aborted."""
    choices = []
    for index in range(len(generation.prompts)):
        text = texts.get(index, "")
        reason = generation.finish_reason if index in texts else "abort"
        content: Json = {"message": {"role": "assistant", "content": text}} if generation.chat else {"text": text}
        choices.append({"index": index, **content, "logprobs": None, "finish_reason": reason})
    kind = "chat.completion" if generation.chat else "text_completion"
    return _head(generation, kind) | {"choices": choices, "usage": generation.usage}


class Chunks:
    """The parts of a streamed answer as server-sent events."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._head = _head(generation, "chat.completion.chunk" if generation.chat else "text_completion")

    def opening(self) -> bytes:
        """What comes before the first text."""
        if not self._generation.chat:
            return b""
        return self._event(0, {"delta": {"role": "assistant", "content": ""}})

    def text(self, index: int, text: str) -> bytes:
        """A part of the answer."""
        return self._event(index, {"delta": {"content": text}} if self._generation.chat else {"text": text})

    def closing(self, *, aborted: bool = False) -> bytes:
        """What comes after the last text: reasons, usage if asked for, and the end mark."""
        reason = "abort" if aborted else self._generation.finish_reason
        ends = []
        for index in range(len(self._generation.prompts)):
            empty: Json = {"delta": {}} if self._generation.chat else {"text": ""}
            ends.append(self._event(index, empty, reason))
        if self._generation.include_usage:
            ends.append(event(self._head | {"choices": [], "usage": self._generation.usage}))
        return b"".join([*ends, b"data: [DONE]\n\n"])

    def _event(self, index: int, content: Json, reason: str | None = None) -> bytes:
        chunk = self._head | {"choices": [{"index": index, **content, "logprobs": None, "finish_reason": reason}]}
        return event(chunk | {"usage": None} if self._generation.include_usage else chunk)


def event(data: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def embeddings(model: str, vectors: Sequence[str | list[float]], tokens: int) -> Json:
    """The answer of /v1/embeddings."""
    data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "model": model, "data": data, "usage": usage}


def models(model: str, max_model_len: int, created: int) -> Json:
    """The answer of /v1/models."""
    served = {"id": model, "object": "model", "created": created, "owned_by": "kybernate-fake", "root": model}
    return {"object": "list", "data": [served | {"parent": None, "max_model_len": max_model_len}]}


def new_id(kind: str) -> str:
    """An id for an answer."""
    return f"{kind}-{os.urandom(12).hex()}"


def _head(generation: Generation, kind: str) -> Json:
    return {"id": generation.id, "object": kind, "created": int(time.time()), "model": generation.model}


def _chat_prompt(body: Json) -> str:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise _bad("messages must be a list of at least one message.", "messages")
    return chat_prompt(messages)


def _prompts(body: Json) -> tuple[str, ...]:
    return read_inputs(body, "prompt")


def _bad(text: str, param: str | None = None) -> ApiError:
    return ApiError(400, "BadRequestError", text, param)
