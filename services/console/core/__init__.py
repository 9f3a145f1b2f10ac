"""The read model of the console. Pure."""
