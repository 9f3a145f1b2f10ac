"""Decisions of the checkpointer: the procedure, its failure table, and the rules of parking and moving. Pure."""
