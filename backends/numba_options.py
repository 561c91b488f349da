"""How kernels are compiled by numba.

The first import of a module of kernels on a machine compiles them, which takes some seconds and is logged.
numba stores the result beside the module or, if that is not writable, in the user's cache folder, by
processor and version. If neither is writable, each process compiles. numba watches only the module itself:
after changing this file, remove ``__pycache__``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from numba import njit, types
from numba.core import event

log = logging.getLogger("kvcache.kernels")


class _Notice(event.Listener):
    """A listener for compilations by numba; loading a stored kernel does not trigger it."""

    def on_start(self, _: Any) -> None:
        announce()

    def on_end(self, _: Any) -> None:
        """See ``on_start``."""


@functools.cache
def announce() -> None:
    """Log a warning, once per process, since compilation takes several seconds without output."""
    log.warning("compiling kernels for this processor: about 10 seconds, once for each version of numba")


def _compiled(function: Any, *signature: Any, **options: Any) -> Any:
    with event.install_listener("numba:compile", _Notice()):
        return njit(*signature, **options)(function)


def part(fastmath: Any) -> Callable[[Any], Any]:
    """A decorator for functions inlined in kernels."""
    made: Callable[[Any], Any] = njit(error_model="numpy", fastmath=fastmath)
    return made


def kernel(*given: Any, fastmath: Any, result: Any = types.void) -> Callable[[Any], Any]:
    """A decorator for kernels with arguments of these types, compiled immediately or loaded from disk."""

    def decorate(function: Any) -> Any:
        options = {"nogil": True, "error_model": "numpy", "fastmath": fastmath}
        try:
            return _compiled(function, result(*given), cache=True, **options)
        except (RuntimeError, OSError):  # no writable folder, or no space
            return _compiled(function, result(*given), **options)

    return decorate
