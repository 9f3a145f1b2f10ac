"""The whole product on one real GPU: models that do not fit together take turns, and every answer is compared.

``python -m bench.gpu.stack --models 4 --gib 20`` starts a stack (router, manager, plugin, checkpointer, NATS) with the
code for real GPUs, and engines of ``bench.gpu.engine`` as its pods. It asks the models in turn, so that each request
finds its model parked, and writes the waits, the phases of the switches, and whether each text is the one from before
the first park. Needs PyTorch; ``--stub`` checks the bench on made-up hardware. Exit code 0: all answered, all equal.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import aiohttp
import yaml

from kybernate.dev.stack import LAPTOP, Stack, StackOptions

PROMPT = "Tell me why a parked model answers as before."
TOKENS = 32
READY_SECONDS = 120.0
ANSWER_SECONDS = 180.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.stack", description=__doc__)
    parser.add_argument("--models", type=int, default=3)
    parser.add_argument("--gib", type=float, default=4.0, help="of each model")
    parser.add_argument("--memory", default="79GiB", help="of the GPU with --stub")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--budget", type=float, default=500.0, help="seconds; no further request is sent then")
    parser.add_argument("--stub", action="store_true", help="no GPU: stub libraries and fake engines")
    parser.add_argument("--out", type=Path, default=Path("bench/results/gpu"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    result = asyncio.run(run(options))
    _write(result, options.out)
    print(
        json.dumps({key: value for key, value in result.items() if key not in ("calls", "events", "seats")}, indent=1)
    )
    sys.exit(0 if result["calls"] and all(call["ok"] for call in result["calls"]) else 1)


def pod(name: str, gib: float, *, stub: bool) -> dict[str, Any]:
    """A pod with one seat, parked by the driver."""
    engine, size = ("bench.gpu.engine", ("--gib", f"{gib:g}"))
    if stub:
        engine, size = "kybernate.dev.fakes.engine", ("--cuda", "--vram", f"{gib:g}GiB")
    command = [sys.executable, "-m", engine, "--model", name, *size]
    limits = {"kyb.ai/gpu-1x-seat": 1}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": {"kyb.ai/model": name, "kyb.ai/backend": "cuda"}},
        "spec": {
            "containers": [{"name": "engine", "image": "real", "command": command, "resources": {"limits": limits}}]
        },
    }


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Start, ask, stop; what was seen."""
    ends = time.monotonic() + options.budget
    names = [f"model-{chr(97 + number)}" for number in range(options.models)]
    with tempfile.TemporaryDirectory(prefix="kyb-gpu-stack-") as text:
        folder = Path(text)
        pods = folder / "pods.yaml"
        pods.write_text(yaml.safe_dump_all(pod(name, options.gib, stub=options.stub) for name in names))
        driver: Literal["stub", "nvidia"] = "stub" if options.stub else "nvidia"
        asked = StackOptions(driver, config=LAPTOP / "small.yaml", pods=pods, gpus=1, memory=options.memory)
        stack = Stack(asked)
        result: dict[str, Any] = {"models": options.models, "gib_each": options.gib, "calls": [], "failed": ""}
        async with stack:
            try:
                began = time.monotonic()
                await stack.ready(READY_SECONDS, lambda line: print(line, flush=True))
                result["ready_s"] = time.monotonic() - began
                await _play(stack, names, options.rounds, ends, result)
            except Exception as error:  # the logs below say more
                result["failed"] = f"{type(error).__name__}: {error}"[:3000]
            result |= await _seen(stack)
            _keep_logs(stack, options.out)
    return result


async def _play(stack: Stack, names: list[str], rounds: int, ends: float, result: dict[str, Any]) -> None:
    first: dict[str, str] = {}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS)) as session:
        for number in range(rounds + 1):
            for name in names:
                if time.monotonic() > ends:
                    return
                call = await _ask(session, stack.url, name)
                call |= {"model": name, "round": number}
                call["ok"] = call["ok"] and call["text"] == first.setdefault(name, call["text"])
                result["calls"].append(call)
                print(json.dumps(call), flush=True)
        again = await _ask(session, stack.url, names[-1])  # it is active: what a call costs without a switch
        result["active_first_byte_s"] = again["first_byte_s"]
    waits = [call["first_byte_s"] for call in result["calls"] if call["round"] > 0]
    if waits:
        result["first_byte_s"] = {"median": statistics.median(waits), "least": min(waits), "most": max(waits)}


async def _ask(session: aiohttp.ClientSession, url: str, model: str) -> dict[str, Any]:
    """One streamed chat: seconds until the first token and until the end, and the text."""
    body = {"model": model, "stream": True, "max_tokens": TOKENS, "messages": [{"role": "user", "content": PROMPT}]}
    began, first, text = time.monotonic(), 0.0, ""
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            async for raw in answer.content:
                line = raw.decode().strip()
                if line.startswith("data: {"):
                    first = first or time.monotonic() - began
                    text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
                elif line and not line.startswith((":", "data: [DONE]")):
                    text += line[:500]
            ok = answer.status == 200 and bool(text)
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
        return {"ok": False, "first_byte_s": first, "all_s": time.monotonic() - began, "text": repr(error)[:300]}
    return {"ok": ok, "first_byte_s": first, "all_s": time.monotonic() - began, "text": text}


async def _seen(stack: Stack) -> dict[str, Any]:
    """The seats and what happened, as the console has them."""
    found: dict[str, Any] = {}
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
            for name, path in (("seats", "/v1/seats"), ("events", "/v1/history?limit=500")):
                async with session.get(f"{stack.console}{path}") as answer:
                    found[name] = await answer.json()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        found["not_seen"] = repr(error)[:300]
    return found


def _keep_logs(stack: Stack, out: Path) -> None:
    """The ends of all logs in one file."""
    parts = []
    for file in sorted([*stack.folder.glob("logs/*.log"), *stack.folder.glob("run/**/*.log")]):
        parts.append(f"=== {file.name}\n{file.read_text(errors='replace')[-60_000:]}")
    (out / "stack-logs.txt").write_text("\n".join(parts))


def _write(result: dict[str, Any], out: Path) -> None:
    (out / "stack.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
