"""The router's decisions. Pure and synchronous: inputs in, effects out; ``now`` is an argument."""
