"""The fake GPU driver: NVML and the CUDA checkpoint API of a made-up machine, on a unix socket. Strict by design."""
