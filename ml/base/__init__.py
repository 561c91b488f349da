"""Base classes for backends: every check lives here once, a backend only translates.

A backend subclasses :class:`BaseBackend`, :class:`BaseContext` and :class:`StridedTensor` (or
:class:`BaseTensor`, where the framework keeps the geometry itself) and fills in the methods that
start with one underscore. Those receive checked arguments: axes counted from the front, tensors of
this backend, dtypes and shapes that agree. What a backend leaves out of the compute part raises
NotSupportedError. docs/writing-a-backend.md walks through a whole one.
"""

from ml.base.backend import BaseBackend, Storage
from ml.base.checks import check_attention
from ml.base.context import BaseContext
from ml.base.group import BaseGroup, SoloGroup
from ml.base.storage_view import StorageView, StridedTensor
from ml.base.tensor import BaseTensor
from ml.base.translating import translating

__all__ = [
    "BaseBackend",
    "BaseContext",
    "BaseGroup",
    "BaseTensor",
    "SoloGroup",
    "Storage",
    "StorageView",
    "StridedTensor",
    "check_attention",
    "translating",
]
