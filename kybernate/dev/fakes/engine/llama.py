"""Real tokens for an engine: llama.cpp on the CPU, with a small model whose weights are random and follow its name.

Needs the packages ``xllamacpp`` and ``gguf`` (extra ``llama``). The memory on the fake GPUs is taken beside it.
"""

import asyncio
import importlib
import importlib.util
import tempfile
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

_WIDTH, _HEADS, _LAYERS, _CONTEXT = 64, 4, 2, 1024
_SYLLABLES = [onset + rime for onset in "bdfghklmnprstvwz" for rime in ("a", "e", "i", "o", "u", "an", "en", "on")]


def missing() -> str:
    """The reason why llama.cpp cannot be had here; empty if it can."""
    absent = [name for name in ("xllamacpp", "gguf") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(absent)} not installed; make setup says why" if absent else ""


class Llama:
    """A llama.cpp server in this process, on a port of the loopback; loaded and unloaded."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._server: Any = None

    async def load(self) -> None:
        """Start the server, with the model read from its file."""
        self._server = await asyncio.to_thread(self._start)

    async def unload(self) -> None:
        """End it. No request may run."""
        server, self._server = self._server, None
        await asyncio.to_thread(lambda ended: ended.clear(), [server])
        del server

    async def answer(self, path: str, body: bytes) -> AsyncIterator[tuple[int, str, bytes]]:
        """The answer in pieces, each with status and type."""
        headers = {"Content-Type": "application/json"}
        url = f"{self._server.listening_address}{path}"
        async with aiohttp.ClientSession() as http, http.post(url, data=body, headers=headers) as answer:
            async for piece in answer.content.iter_any():
                yield answer.status, answer.headers["Content-Type"], piece

    def _start(self) -> Any:
        xllamacpp: Any = importlib.import_module("xllamacpp")
        with tempfile.TemporaryDirectory(prefix="kyb-llama-") as folder:
            path = Path(folder) / "model.gguf"
            write_model(path, self._model)
            params = xllamacpp.CommonParams()
            params.model.path = str(path)
            params.model_alias = {self._model}
            params.port = 0
            params.n_ctx, params.n_parallel, params.n_threads_http = _CONTEXT, 1, 2
            params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
            params.warmup = False
            return xllamacpp.Server(params)


def write_model(path: Path, name: str) -> None:
    """Write a Llama of two layers as GGUF. Its greedy answers are words; the same name gives the same weights."""
    gguf: Any = importlib.import_module("gguf")
    np: Any = importlib.import_module("numpy")
    random = np.random.default_rng(zlib.crc32(name.encode()))
    control = [b"<unk>", b"<s>", b"</s>", *(f"<0x{byte:02X}>".encode() for byte in range(256))]
    tokens = [*control, *(f"\u2581{word}".encode() for word in _SYLLABLES)]
    kinds = gguf.TokenType
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256, *[kinds.NORMAL] * len(_SYLLABLES)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(2 * _WIDTH)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_HEADS)
    writer.add_rope_dimension_count(_WIDTH // _HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }} {% endfor %}")

    def tensor(label: str, *shape: int) -> None:
        writer.add_tensor(label, (random.standard_normal(shape) * 0.3).astype(np.float32))

    def norm(label: str) -> None:
        writer.add_tensor(label, np.ones(_WIDTH, np.float32))

    tensor("token_embd.weight", len(tokens), _WIDTH)
    output = random.standard_normal((len(tokens), _WIDTH)).astype(np.float32)
    output[: len(control)] = 0  # words are always likelier
    writer.add_tensor("output.weight", output)
    norm("output_norm.weight")
    for layer in range(_LAYERS):
        block = f"blk.{layer}."
        norm(f"{block}attn_norm.weight")
        norm(f"{block}ffn_norm.weight")
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensor(f"{block}{part}.weight", _WIDTH, _WIDTH)
        tensor(f"{block}ffn_gate.weight", 2 * _WIDTH, _WIDTH)
        tensor(f"{block}ffn_up.weight", 2 * _WIDTH, _WIDTH)
        tensor(f"{block}ffn_down.weight", _WIDTH, 2 * _WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
