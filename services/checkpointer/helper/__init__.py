"""The helper process, which makes the driver calls and which the checkpointer may kill at any moment.

It imports little besides the driver binding.
"""
