#!/opt/kybernate/bin/python
"""Stands for llama-server, trtllm-serve and vllm in the images of bench_real_cluster: on a seat the fake engine (of
llama-server with the answers of llama.cpp), without a seat llama.cpp alone.
"""

import importlib
import os
import signal
import sys
from typing import Any

LIBRARIES = "/opt/engines/lib"


def main(program: str, arguments: list[str]) -> None:
    def option(name: str) -> str:
        return arguments[arguments.index(name) + 1] if name in arguments else ""

    plain = [word for word in arguments if word != "serve"]
    model, port = option("--alias") or plain[0], option("--port")
    if os.environ.get("KYB_FAKE_GPU"):
        python = "/opt/kybernate/bin/python"
        engine = [python, "-m", "kybernate.dev.fakes.engine", "--model", model, "--port", port, "--host", "0.0.0.0"]
        how = ["--llama", "--load-seconds", "0"] if program == "llama-server" else ["--load-seconds", "1"]
        os.environ["PYTHONPATH"] = LIBRARIES
        os.execv(python, [*engine, *how, "--vram", "60GiB"])
    sys.path.append(LIBRARIES)
    xllamacpp: Any = importlib.import_module("xllamacpp")

    from kybernate.dev.fakes.engine.llama import write_model

    write_model(path := f"/tmp/{port}.gguf", model)
    params = xllamacpp.CommonParams()
    params.model.path, params.model_alias, params.hostnames, params.port = path, {model}, ["0.0.0.0"], int(port)
    params.n_ctx, params.n_parallel, params.n_threads_http, params.warmup = 1024, 1, 2, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    server = xllamacpp.Server(params)
    print(f"serves {model} at {server.listening_address}", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main(os.path.basename(sys.argv[0]), sys.argv[1:])
