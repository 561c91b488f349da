"""MLX's own errors as those of the contract."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ml.errors import DeviceError, MLError

MLX_ERRORS = (RuntimeError, ValueError, TypeError, OverflowError, MemoryError)


@contextmanager
def device_errors(op: str) -> Iterator[None]:
    """Turn what MLX raises in the block into DeviceError."""
    try:
        yield
    except MLError:
        raise
    except MLX_ERRORS as error:
        raise DeviceError(f"{op}: MLX failed: {error}") from error


def translated(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """The method with the same translation; in line, since it runs with every operation."""
    op = name.lstrip("_")

    @functools.wraps(method)
    def call(self: Any, *args: Any) -> Any:
        try:
            return method(self, *args)
        except MLError:
            raise
        except MLX_ERRORS as error:
            raise DeviceError(f"{op}: MLX failed on {self!r}: {error}") from error

    return call
