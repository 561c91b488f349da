"""Base classes for backends: all checks are made here, so that a backend only translates.

A backend subclasses ``BaseBackend``, ``BaseContext`` and ``StridedTensor`` (or ``BaseTensor`` if the
framework keeps the geometry itself) and implements the methods that start with one underscore. These receive
checked arguments: axes counted from the front, tensors of this backend, matching dtypes and shapes. Compute
methods that a backend does not implement raise NotSupportedError. docs/writing-a-backend.md builds a complete
backend.
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
