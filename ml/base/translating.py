"""Translates a framework's exceptions into errors of ml."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any, TypeVar

from ml.errors import DeviceError, MLError

Kind = TypeVar("Kind", bound=type)


def translating(*errors: type[BaseException]) -> Callable[[Kind], Kind]:
    """A class decorator for contexts and tensors: an exception of ``errors`` raised in a hook becomes a
    DeviceError.

    Almost every hook allocates and may run out of memory, so ``errors`` should include MemoryError or the
    framework's equivalent. The message names the operation and the device. Errors of ml pass unchanged. Hooks
    are the methods and properties that the class itself defines, except ``__x__``.
    """

    def decorate(kind: Kind) -> Kind:
        for name, hook in [*vars(kind).items()]:
            if isinstance(hook, property) and hook.fget is not None:
                setattr(kind, name, property(_translated(hook.fget, errors)))
            elif isinstance(hook, FunctionType) and not name.startswith("__"):
                setattr(kind, name, _translated(hook, errors))
        return kind

    return decorate


def _translated(hook: Callable[..., Any], errors: tuple[type[BaseException], ...]) -> Callable[..., Any]:
    @wraps(hook)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return hook(self, *arguments, **options)
        except MLError:
            raise
        except errors as error:
            op, device = hook.__name__.lstrip("_"), self.backend.devices[0].name
            what = "out of memory" if isinstance(error, MemoryError) else "failed"
            raise DeviceError(f"{op}: {what} on {device}: {error}") from error

    return call
