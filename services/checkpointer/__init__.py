"""The checkpoint worker: the only thing that touches engine processes."""
