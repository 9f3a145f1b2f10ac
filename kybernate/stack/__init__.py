"""``kyb up``: everything as processes on one machine, with fake GPUs. Also what the demo and the tests run on."""

from kybernate.stack.options import LAPTOP, StackOptions
from kybernate.stack.stack import SERVICES, Stack, StackError

__all__ = ["LAPTOP", "SERVICES", "Stack", "StackError", "StackOptions"]
