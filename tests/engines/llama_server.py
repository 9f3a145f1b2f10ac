"""``python llama_server.py NAME PORT``: llama.cpp's own server, with the model of ``write_model``, until SIGTERM."""

import os
import signal
import sys
import tempfile
from pathlib import Path

import xllamacpp

from kybernate.dev.fakes.engine.llama import write_model

name, port = sys.argv[1], int(sys.argv[2])
with tempfile.TemporaryDirectory(prefix="kyb-llama-") as folder:
    path = Path(folder) / "model.gguf"
    write_model(path, name)
    params = xllamacpp.CommonParams()
    params.model.path, params.model_alias = str(path), {name}
    params.hostnames, params.port = [os.environ["POD_IP"]], port
    params.n_ctx, params.n_parallel, params.embedding, params.warmup = 2048, 2, True, False
    params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    server = xllamacpp.Server(params)
signal.sigwait([signal.SIGTERM])
os._exit(0)  # its threads end with the process
