"""Functions that numba compiles on their first call, and the types of their arrays.

Compiling the bounds takes seconds, so numba keeps the machine code beside the source. Where that folder cannot be
written (a read-only install) it uses the user's cache folder; where there is none either, each process compiles again.
Without numba the import raises ModuleNotFoundError with the remedy.
"""

from collections.abc import Callable
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from kybernate.lab import INSTALL

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Counts = NDArray[np.int32]
Table = NDArray[np.float32]

Function = TypeVar("Function", bound=Callable[..., object])

try:
    import numba
except ImportError as error:
    raise ModuleNotFoundError(
        f"bounds and optima need numpy and numba, which are not installed; run: {INSTALL}"
    ) from error


def compiled(function: Function) -> Function:
    """Return the same function as machine code. Arguments: numpy arrays and numbers."""
    try:
        return cast(Function, numba.njit(cache=True)(function))
    except RuntimeError:  # numba's "no locator available": nowhere to keep the result
        return cast(Function, numba.njit(function))
