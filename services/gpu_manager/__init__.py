"""The node's GPU manager: who holds which GPUs, decided by one writer."""
