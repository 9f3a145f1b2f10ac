"""``llama-server -m FILE --port N``: llama.cpp's own server, as its program takes these options, until SIGTERM."""

import argparse
import os
import signal
from pathlib import Path

import xllamacpp

parser = argparse.ArgumentParser()
parser.add_argument("-m", "--model", type=Path, required=True)
parser.add_argument("-a", "--alias")
parser.add_argument("--host", default="127.0.0.1")
parser.add_argument("--port", type=int, default=8080)
given = parser.parse_args()
params = xllamacpp.CommonParams()
params.model.path, params.model_alias = str(given.model), {given.alias or given.model.stem}
params.hostnames, params.port = [given.host], given.port
params.n_predict = 64
params.n_ctx, params.n_parallel, params.embedding, params.warmup = 2048, 2, True, False
params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
server = xllamacpp.Server(params)
signal.sigwait([signal.SIGTERM])
os._exit(0)  # its threads end with the process
