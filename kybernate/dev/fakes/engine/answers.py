"""What the fake engine answers: a function of model, prompt and number of tokens, so that any mix-up shows. Pure.

Standard library only: load generators compare answers with it.
"""

import base64
import hashlib
import struct
from collections.abc import Sequence
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
    return [*words[:1], *[" " + word for word in words[1:]]]


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
