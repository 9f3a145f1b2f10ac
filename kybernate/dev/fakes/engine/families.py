"""The other APIs that engines serve besides chat, completions and embeddings: answers of ``protocol``'s kind, in the
shapes that OpenAI (responses, audio), Anthropic (messages) and vLLM (rerank, score, tokenize) document. No I/O.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kybernate.dev.fakes.engine import protocol
from kybernate.dev.fakes.engine.protocol import ApiError, Generation, Json, expected_embedding, new_id, prompt_tokens


@dataclass(frozen=True, slots=True)
class Style:
    """How an API asks for text and gets it."""

    field: str
    """Of the conversation."""
    length: str
    """Of the longest answer."""

    def read(self, body: Any, model: str, max_model_len: int) -> Generation:
        """Check a body. Raises ApiError."""
        checked = protocol.read_body(body, model)
        given = checked.get(self.field)
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
        chat = {"model": model, "messages": messages, "stream": checked.get("stream", False)}
        if checked.get(self.length) is not None:
            chat["max_tokens"] = checked[self.length]
        return protocol.read_generation(chat, model=model, chat=True, id="", max_model_len=max_model_len)


class Responses(Style):
    """OpenAI's ``/v1/responses``. Nothing is stored."""

    def whole(self, generation: Generation, text: str, status: str = "completed") -> Json:
        """The answer in one piece."""
        content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
        message = {"id": "msg_1", "type": "message", "role": "assistant", "status": status, "content": content}
        used = generation.usage
        usage = {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": used["total_tokens"],
        }
        return {
            "id": generation.id,
            "object": "response",
            "created_at": 0,
            "status": status,
            "model": generation.model,
            "output": [message] if status == "completed" else [],
            "parallel_tool_calls": False,
            "tool_choice": "auto",
            "tools": [],
            "usage": usage if status == "completed" else None,
        }

    def events(self, generation: Generation, texts: Sequence[str]) -> Iterator[Json]:
        """The parts of a streamed answer."""
        place = {"item_id": "msg_1", "output_index": 0, "content_index": 0, "logprobs": []}
        yield {"type": "response.created", "response": self.whole(generation, "", "in_progress")}
        for text in texts:
            yield {"type": "response.output_text.delta", **place, "delta": text}
        yield {"type": "response.output_text.done", **place, "text": "".join(texts)}
        yield {"type": "response.completed", "response": self.whole(generation, "".join(texts))}


class Messages(Style):
    """Anthropic's ``/v1/messages``."""

    def whole(self, generation: Generation, text: str) -> Json:
        """The answer in one piece."""
        used = generation.usage
        return {
            "id": generation.id,
            "type": "message",
            "role": "assistant",
            "model": generation.model,
            "content": [{"type": "text", "text": text}],
            "stop_reason": "max_tokens" if generation.limited else "end_turn",
            "stop_sequence": None,
            "usage": {"input_tokens": used["prompt_tokens"], "output_tokens": used["completion_tokens"]},
        }

    def events(self, generation: Generation, texts: Sequence[str]) -> Iterator[Json]:
        """The parts of a streamed answer."""
        end = self.whole(generation, "")
        yield {"type": "message_start", "message": end | {"content": [], "stop_reason": None}}
        yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        for text in texts:
            yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
        yield {"type": "content_block_stop", "index": 0}
        delta = {"stop_reason": end["stop_reason"], "stop_sequence": None}
        yield {"type": "message_delta", "delta": delta, "usage": {"output_tokens": end["usage"]["output_tokens"]}}
        yield {"type": "message_stop"}


STYLES: dict[str, tuple[Responses | Messages, str]] = {
    "/v1/responses": (Responses("input", "max_output_tokens"), "resp"),
    "/v1/messages": (Messages("messages", "max_tokens"), "msg"),
}
"""By path: the style, and how its ids begin."""


def read(path: str, body: Any, model: str, max_model_len: int) -> Generation:
    """Check a body of one of STYLES. Raises ApiError."""
    style, kind = STYLES[path]
    return replace(style.read(body, model, max_model_len), id=new_id(kind))


def events(path: str, generation: Generation, texts: Sequence[str]) -> bytes:
    """A streamed answer as server-sent events; each event's name is its type."""
    found = []
    for number, event in enumerate(STYLES[path][0].events(generation, texts)):
        data = json.dumps({**event, "sequence_number": number})
        found.append(f"event: {event['type']}\ndata: {data}\n\n".encode())
    return b"".join(found)


def score(model: str, query: str, text: str) -> float:
    """How well two texts fit, from 0 to 1: a function of both."""
    return (expected_embedding(model, f"{query}\0{text}")[0] + 1) / 2


def text_of(numbers: Any) -> str:
    """The text with these tokens, which are its characters' code points. Raises ApiError."""
    try:
        return "".join(map(chr, numbers))
    except (OverflowError, TypeError, ValueError) as error:
        raise ApiError(400, "BadRequestError", "tokens must be a list of token numbers", "tokens") from error


def other(path: str, body: Any, model: str, max_model_len: int) -> Json:
    """The answer of the APIs that generate no text. Raises ApiError."""
    checked = protocol.read_body(body, model)

    def texts(name: str) -> tuple[str, ...]:
        return protocol.read_inputs(checked, name)

    head = {"id": new_id("other"), "model": model}
    if path == "/v1/rerank":
        documents = texts("documents")
        scores = [(score(model, texts("query")[0], text), index) for index, text in enumerate(documents)]
        ranked = [
            {"index": index, "relevance_score": found, "document": {"text": documents[index]}}
            for found, index in sorted(scores, reverse=True)
        ]
        return head | {
            "results": ranked[: checked.get("top_n") or None],
            "usage": {"total_tokens": sum(map(prompt_tokens, documents))},
        }
    if path == "/v1/score":
        pairs = [(one, two) for one in texts("text_1") for two in texts("text_2")]
        data = [{"index": index, "object": "score", "score": score(model, *pair)} for index, pair in enumerate(pairs)]
        return head | {"object": "list", "data": data}
    if path == "/v1/detokenize":
        return {"prompt": text_of(checked.get("tokens"))}
    if path == "/v1/messages/count_tokens":
        return {"input_tokens": STYLES["/v1/messages"][0].read(checked, model, max_model_len).prompt_tokens}
    numbers = [ord(character) for character in texts("prompt")[0]]
    return {"count": len(numbers), "max_model_len": max_model_len, "tokens": numbers}


OTHERS = ("/v1/rerank", "/v1/score", "/v1/tokenize", "/v1/detokenize", "/v1/messages/count_tokens")
"""Paths of ``other``."""


def transcription(model: str, audio: bytes) -> str:
    """The words in a file: a function of its bytes."""
    return protocol.expected_text(model, f"{len(audio)} {audio[:64].hex()}", 8)
