"""The checkpointer: parks and activates the processes of seats; the only program that touches them."""
