#!/bin/sh
# Tests Kybernate with servers that others wrote. Installs vLLM's for the CPU into .venv-vllm (5 GB), beside .venv.
set -eu
cd "$(dirname "$0")/.."
sh scripts/pip_target.sh .venv-vllm requirements/vllm.txt
KYB_VLLM=1 exec .venv/bin/python -m pytest -q -rP tests/engines "$@"
