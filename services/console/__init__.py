"""The operators' console: shows the cluster and sends commands; no call depends on it."""
