"""``kyb up``: everything as processes on one machine, with fake GPUs. Also what the demo and the tests run on."""

from kybernate.dev.stack.options import LAPTOP, StackOptions
from kybernate.dev.stack.stack import SERVICES, NotReadyError, Stack, StackError

__all__ = ["LAPTOP", "SERVICES", "NotReadyError", "Stack", "StackError", "StackOptions"]
