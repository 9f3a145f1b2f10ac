"""The language of Kybernate: what every service says, knows and shares. Imports nothing from services/."""

__version__ = "0.1.0"
