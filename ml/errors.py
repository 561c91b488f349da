"""Every refusal of this library: one base class, and each a builtin exception as well.

A message names the operation, the offending value, the limit, and where it helps the remedy.
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
    """A dtype that the operation does not take, or operands whose dtypes differ."""


class ShapeError(MLError, ValueError):
    """A shape, axis, stride or count that does not fit the operation."""


class BoundsError(MLError, IndexError):
    """An offset, range or index outside the storage or the axis."""


class ReadOnlyError(MLError, ValueError):
    """A write through a view whose elements share memory (a stride of 0)."""


class NotSupportedError(MLError, NotImplementedError):
    """The backend or cache declares that it does not offer this."""


class ExportError(NotSupportedError, BufferError, ValueError):
    """A tensor's memory cannot be handed out as asked: by DLPack, or by NumPy's ``copy=False``.

    DLPack's protocol wants a BufferError of such a refusal, NumPy's ``__array__`` a ValueError.
    """


class OptionError(MLError, TypeError):
    """An option that the backend does not have, or the lack of one that it requires."""


class DeviceError(MLError, RuntimeError):
    """The device or its framework failed: out of memory, a kernel error, no such device."""


class GroupError(MLError, RuntimeError):
    """Ranks could not be joined, or one has ended, stopped or come too late: the group is broken.

    ``late``: whether another rank was waited for as long as the limit lets it.
    """

    late = False


class ClosedError(MLError, RuntimeError):
    """A backend, context or cache was used after ``close``."""


class BackendNotFoundError(MLError, LookupError):
    """No plugin provides a backend of that name."""


class BackendUnavailableError(MLError, RuntimeError):
    """The backend exists but cannot run here; the message says why and what to install."""


class PluginError(MLError, RuntimeError):
    """A plugin broke a rule: two of one name, or a record that is not a BackendSpec."""
