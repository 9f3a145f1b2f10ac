"""The helper process, which makes the driver calls and which the checkpointer may kill at any moment.

Imports little besides the driver binding, since it is started again after each hang.
"""
