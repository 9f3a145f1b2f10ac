"""Functions that numba compiles on their first call, and what happens where it is missing or may not keep its results.

Compiling the bounds takes seconds, so numba keeps the machine code beside the source; where that folder cannot be
written (a read-only install) it takes the user's cache folder, and where there is none either, this process compiles
for itself.
"""

from collections.abc import Callable
from typing import TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., object])

try:
    import numba
except ImportError as error:
    raise ModuleNotFoundError(
        "bounds and optima need numpy and numba, which are not installed; run: pip install 'kybernate[lab]'"
    ) from error


def compiled(function: Function) -> Function:
    """The same function as machine code. Arguments: numpy arrays and numbers."""
    try:
        return cast(Function, numba.njit(cache=True)(function))
    except RuntimeError:  # numba's "no locator available": nowhere to keep the result
        return cast(Function, numba.njit(function))
