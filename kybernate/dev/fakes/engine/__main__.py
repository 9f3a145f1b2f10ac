"""``python -m kybernate.dev.fakes.engine``: one fake engine as a process, as the container of a seat would run vLLM."""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from kybernate.clock import Clock
from kybernate.dev.fakes.engine.apis import APIS, ApiOptions
from kybernate.dev.fakes.engine.app import build_app
from kybernate.dev.fakes.engine.engine import Engine, EngineOptions
from kybernate.dev.fakes.engine.libcuda import CudaError
from kybernate.dev.fakes.engine.lies import Lie, Lies
from kybernate.dev.fakes.engine.llama import Llama, missing
from kybernate.dev.fakes.engine.memory import Vram
from kybernate.dev.fakes.gpu.client import DriverError
from kybernate.sizes import parse_bytes

_SLEEP_SWITCH = {"vllm": "enable_sleep_mode", "sglang": "enable_memory_saver"}


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM. Exit code 1: no room, no address or dead; 2: a wrong option; 3: the driver is gone."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        Lies.read(",".join([os.environ.get("KYB_FAKE_LIES", ""), *options.lie]))
    except ValueError as error:
        parser.error(f"--lie: {error}; known are {', '.join(Lie)}")
    if options.llama and (absent := missing()):
        parser.error(f"--llama: {absent}")
    if not options.cuda and (options.driver is None or not options.gpus):
        text = "no GPUs: set KYB_FAKE_DRIVER (socket) and KYB_FAKE_GPU (UUIDs), or give --driver and --gpus"
        parser.error(f"{text}; or --cuda where there is a libcuda.so.1")
    sys.exit(asyncio.run(_serve(options)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m kybernate.dev.fakes.engine", description="A fake OpenAI-compatible engine."
    )
    env, add, usual = os.environ, parser.add_argument, EngineOptions("")
    add("--model", required=True, help="the model it serves")
    add("--vram", type=_size, default=_size("40GiB"), help="memory it takes, spread evenly over its GPUs")
    add("--residue", type=_size, help="memory that engine sleep leaves; default: a twentieth")
    add("--load-seconds", type=float, default=usual.load_seconds)
    add("--tokens-per-second", type=float, default=usual.tokens_per_second)
    add("--prefill-tokens-per-second", type=float, default=usual.prefill_tokens_per_second)
    add("--max-chunks", type=int, default=usual.max_chunks, help="most parts of a stream above speed 1")
    add("--max-running", type=int, default=usual.max_running, help="requests computed at the same time")
    add("--max-model-len", type=int, default=usual.max_model_len, help="most tokens of prompt and answer")
    add("--speed", type=float, default=float(env.get("KYB_SPEED", "1")), help="model seconds per wall second")
    add("--host", default=env.get("POD_IP", "127.0.0.1"))
    add("--port", type=int, default=8000)
    add("--driver", type=Path, default=env.get("KYB_FAKE_DRIVER"), help="socket of the fake GPU driver")
    add("--gpus", type=_names, default=env.get("KYB_FAKE_GPU", ""), help="UUIDs, separated by commas")
    add("--api", choices=sorted(APIS), help="whose sleep API it has, and only with that vendor's options; else vLLM's")
    add("--lie", action="append", default=[], metavar="NAME[@TURN]", help=f"one of {', '.join(Lie)}")
    add("--api-key", default="")
    add("--enable-sleep-mode", "--enable_sleep_mode", action="store_true", help="as the vendor's option")
    switches = ("--enable-memory-saver", "--enable-weights-cpu-backup", "--enable-metrics")
    for name in (*switches, "--metrics", "--no-models-autoload"):
        add(name, action="store_true", help="as the vendor's option")
    add("--llama", action="store_true", help="answers of llama.cpp on the CPU (extra llama), else made up ones")
    add("--cuda", action="store_true", help="take the memory of the visible GPUs through libcuda.so.1")
    add("--seat", default=env.get("KYB_GPU_SEAT", ""), help="seat that it says it has")
    return parser


async def _serve(options: argparse.Namespace) -> int:
    """The exit code."""
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    clock = Clock(options.speed)
    unloads = options.api in ("llamacpp", "ollama")  # nothing stays in use
    usual = 0 if unloads else options.vram // 20
    residue = usual if options.residue is None else options.residue
    try:
        vram = await _vram(options, residue, clock)
        engine = Engine(_engine_options(options), vram, clock, Llama(options.model) if options.llama else None)
        runner = web.AppRunner(
            build_app(engine, options.api or "vllm", _api_options(options)),
            handler_cancellation=True,  # a client that goes away ends the computation
            keepalive_timeout=86400.0,  # time stands still while parked: no connection may be found too old after it
            shutdown_timeout=0.05,
            access_log=None,
        )
        try:
            await runner.setup()
            await web.TCPSite(runner, options.host, options.port, backlog=1024).start()
            return await _live(engine, vram, stop)
        finally:
            await runner.cleanup()
            await vram.close()
    except (CudaError, DriverError, OSError) as error:
        _log("engine.failed", model=options.model, error=str(error))
        return 3 if isinstance(error, ConnectionError) else 1


async def _vram(options: argparse.Namespace, residue: int, clock: Clock) -> Vram:
    if options.cuda:
        return await Vram.open_cuda(options.driver, options.vram, residue, clock)
    given = [name for name in _names(os.environ.get("NVIDIA_VISIBLE_DEVICES", "")) if name.startswith(("GPU-", "MIG-"))]
    return await Vram.connect(options.driver, options.seat, options.gpus, options.vram, residue, clock, given)


async def _live(engine: Engine, vram: Vram, stop: asyncio.Event) -> int:
    """Load, then serve; exit code 0 after a stop signal, 1 if the engine is dead, 3 without driver."""
    model, began = engine.options.model, time.monotonic()
    ends = {"stop": _task(stop.wait()), "failed": _task(engine.failed.wait()), "driver": _task(vram.lost())}
    loading, hangs = _task(engine.load()), _task(_tell_that_it_hangs(engine))
    try:
        await asyncio.wait([loading, *ends.values()], return_when=asyncio.FIRST_COMPLETED)
        if loading.done() and not stop.is_set():
            loading.result()
            _log("engine.ready", model=model, seconds=round(time.monotonic() - began, 3))
            await asyncio.wait(ends.values(), return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            return 0
        if engine.failed.is_set():
            _log("engine.failed", model=model, error=engine.failure)
            return 1
        _log("engine.driver_lost", model=model, error="the fake GPU driver closed the connection; a GPU is gone")
        return 3
    finally:
        for task in (loading, hangs, *ends.values()):
            task.cancel()
        with contextlib.suppress(Exception):
            await asyncio.gather(loading, hangs, *ends.values(), return_exceptions=True)


async def _tell_that_it_hangs(engine: Engine) -> None:
    await engine.hangs.wait()
    _log("engine.hangs", model=engine.options.model)


def _task(work: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
    return asyncio.create_task(work)


def _engine_options(options: argparse.Namespace) -> EngineOptions:
    return EngineOptions(
        model=options.model,
        load_seconds=options.load_seconds,
        tokens_per_second=options.tokens_per_second,
        prefill_tokens_per_second=options.prefill_tokens_per_second,
        max_chunks=options.max_chunks,
        max_running=options.max_running,
        max_model_len=options.max_model_len,
        sleeps=_has(options, _SLEEP_SWITCH),
        lies=Lies.read(",".join([os.environ.get("KYB_FAKE_LIES", ""), *options.lie])),
    )


def _api_options(options: argparse.Namespace) -> ApiOptions:
    dev_mode = os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
    return ApiOptions(
        key=options.api_key,
        dev_mode=dev_mode or options.api != "vllm",
        cpu_backup=_has(options, {"sglang": "enable_weights_cpu_backup"}),
        metrics=_has(options, {"sglang": "enable_metrics", "llamacpp": "metrics"}),
        autoload=not options.no_models_autoload,
    )


def _has(options: argparse.Namespace, names: dict[str, str]) -> bool:
    """Whether the option that its API wants for this is given; True where the API wants none."""
    return options.api not in names or bool(getattr(options, names[options.api]))


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _log(event: str, **data: object) -> None:
    """One JSON line; the services' logger costs an engine half of its start."""
    sys.stderr.write(json.dumps({"event": event, "service": "fake-engine", **data}) + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
