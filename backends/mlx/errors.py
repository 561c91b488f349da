"""Translates MLX's errors into those of the contract."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ml.errors import DeviceError, MLError

MLX_ERRORS = (RuntimeError, ValueError, TypeError, OverflowError, MemoryError)


class device_errors:  # noqa: N801
    """Turn errors of MLX in the block into DeviceError. A class, since a generator takes a microsecond
    more.
    """

    __slots__ = ("op",)

    def __init__(self, op: str) -> None:
        self.op = op

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, MLX_ERRORS) and not isinstance(error, MLError):
            raise DeviceError(f"{self.op}: MLX failed: {error}") from error


def translated(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method with the same translation; inlined, since it runs for every operation."""
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
