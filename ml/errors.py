"""The errors of this library: they have one base class, and each is also a builtin exception.

A message names the operation, the offending value, the limit and, if it helps, the remedy.
"""

from __future__ import annotations

__all__ = [
    "BackendNotFoundError",
    "BackendUnavailableError",
    "BoundsError",
    "ClosedError",
    "DTypeError",
    "DeviceError",
    "ExportError",
    "GroupError",
    "MLError",
    "NotSupportedError",
    "OptionError",
    "PluginError",
    "ReadOnlyError",
    "ShapeError",
]


class MLError(Exception):
    """Base of all errors raised by ``ml`` and its backends."""


class DTypeError(MLError, TypeError):
    """A dtype that the operation does not support, or operands with different dtypes."""


class ShapeError(MLError, ValueError):
    """A shape, axis, stride or count that does not fit the operation."""


class BoundsError(MLError, IndexError):
    """An offset, range or index outside the storage or the axis."""


class ReadOnlyError(MLError, ValueError):
    """A write through a view whose elements share memory (a stride of 0)."""


class NotSupportedError(MLError, NotImplementedError):
    """The backend or cache does not support this operation."""


class ExportError(NotSupportedError, BufferError, ValueError):
    """A tensor's memory cannot be exported as requested, by DLPack or NumPy's ``copy=False``.

    DLPack's protocol requires a BufferError, NumPy's ``__array__`` a ValueError.
    """


class OptionError(MLError, TypeError):
    """An option that the backend does not have, or a required one that is missing."""


class DeviceError(MLError, RuntimeError):
    """The device or its framework failed: out of memory, a kernel error, no such device."""


class GroupError(MLError, RuntimeError):
    """The ranks could not be joined, or the group is broken because one of them ended, stopped or timed out.

    ``late``: whether waiting for another rank timed out.
    """

    late = False


class ClosedError(MLError, RuntimeError):
    """A backend, context or cache was used after ``close``."""


class BackendNotFoundError(MLError, LookupError):
    """No plugin provides a backend of that name."""


class BackendUnavailableError(MLError, RuntimeError):
    """The backend exists but cannot run here; the message says why and what to install."""


class PluginError(MLError, RuntimeError):
    """A plugin is invalid: its name is used twice, or its record is not a BackendSpec."""
