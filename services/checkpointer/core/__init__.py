"""Decisions of the checkpointer without I/O: the procedure, its failure table, and the rules of parking and moving."""
