"""The router's decisions, pure and synchronous: inputs in, effects out; ``now`` is an argument."""
