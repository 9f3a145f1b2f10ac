"""The fake engine: an OpenAI-compatible server as vLLM is one, whose VRAM and computing the fake driver watches."""
