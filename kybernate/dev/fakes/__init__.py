"""Fakes that ship with the product: laptops, CI and demos run on them, so they are strict."""
