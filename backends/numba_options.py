"""How kernels are compiled by numba.

The first import of a module of kernels on a machine compiles for some seconds; numba keeps the result beside
the module or, where that cannot be written, in the user's cache folder, by processor and version. Where
neither can be written, each process compiles. Numba looks only at the module itself: who changes this one
removes ``__pycache__``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit, types


def part(fastmath: Any) -> Callable[[Any], Any]:
    """What kernels are made of."""
    made: Callable[[Any], Any] = njit(error_model="numpy", fastmath=fastmath)
    return made


def kernel(*given: Any, fastmath: Any, result: Any = types.void) -> Callable[[Any], Any]:
    """For arguments of these types: compiled at once, or read from where it was kept."""

    def decorate(function: Any) -> Any:
        options = {"nogil": True, "error_model": "numpy", "fastmath": fastmath}
        try:
            return njit(result(*given), cache=True, **options)(function)
        except (RuntimeError, OSError):  # no folder to keep it in, or no room there
            return njit(result(*given), **options)(function)

    return decorate
