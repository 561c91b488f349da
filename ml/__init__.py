"""Small protocols for tensors with real views, and discovery of the backends that implement them.

>>> import ml
>>> with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
...     x = ctx.from_numpy([[1.0, 2.0], [3.0, 4.0]])
...     x.permute(ctx, 1, 0).to_numpy().tolist()
[[1.0, 3.0], [2.0, 4.0]]

Importing this package imports no framework, only NumPy and ml_dtypes.

PYTEST_DONT_REWRITE
"""

from ml.backend_spec import Availability, BackendInfo, BackendSpec, Features
from ml.capabilities import (
    CAUSAL,
    AttentionCall,
    CacheConfig,
    CausalMask,
    Group,
    KVRowStore,
    KVStore,
    Layout,
    PageTransfer,
    SupportsAttention,
    SupportsCacheConfig,
    SupportsDistributed,
    SupportsGroupedMatmul,
    SupportsHostMemory,
    SupportsKVStorage,
    SupportsPartialAttention,
    SupportsRaggedAttention,
    SupportsRope,
    SupportsTransfers,
)
from ml.devices import BackendMemory, DeviceInfo, DeviceMemory
from ml.dtypes import STORAGE_DTYPES, DType
from ml.errors import (
    BackendNotFoundError,
    BackendUnavailableError,
    BoundsError,
    ClosedError,
    DeviceError,
    DTypeError,
    ExportError,
    GroupError,
    MLError,
    NotSupportedError,
    OptionError,
    PluginError,
    ReadOnlyError,
    ShapeError,
)
from ml.hookspecs import hookimpl
from ml.plugins import available_backends, backend_specs, open_backend
from ml.protocols import Backend, Context, Indices, Tensor
from ml.ragged import RaggedPlan

__all__ = [
    "CAUSAL",
    "STORAGE_DTYPES",
    "AttentionCall",
    "Availability",
    "Backend",
    "BackendInfo",
    "BackendMemory",
    "BackendNotFoundError",
    "BackendSpec",
    "BackendUnavailableError",
    "BoundsError",
    "CacheConfig",
    "CausalMask",
    "ClosedError",
    "Context",
    "DType",
    "DTypeError",
    "DeviceError",
    "DeviceInfo",
    "DeviceMemory",
    "ExportError",
    "Features",
    "Group",
    "GroupError",
    "Indices",
    "KVRowStore",
    "KVStore",
    "Layout",
    "MLError",
    "NotSupportedError",
    "OptionError",
    "PageTransfer",
    "PluginError",
    "RaggedPlan",
    "ReadOnlyError",
    "ShapeError",
    "SupportsAttention",
    "SupportsCacheConfig",
    "SupportsDistributed",
    "SupportsGroupedMatmul",
    "SupportsHostMemory",
    "SupportsKVStorage",
    "SupportsPartialAttention",
    "SupportsRaggedAttention",
    "SupportsRope",
    "SupportsTransfers",
    "Tensor",
    "available_backends",
    "backend_specs",
    "hookimpl",
    "open_backend",
]
