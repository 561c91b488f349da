"""Converts tensors of torch to tensors of a backend and back, without a copy if both can share memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

import ml
from kvcache import CacheFormat
from kvcache.cache import OneDType

__all__ = ["Bridge", "HFDType", "bridge_to", "dtype_of", "stored_dtype", "torch_dtype"]

HFDType: TypeAlias = OneDType | torch.dtype | tuple[OneDType | torch.dtype, OneDType | torch.dtype]
"""A format of ``Cache.init``, with torch.dtype allowed in place of ml.DType."""

_DTYPES = {torch.float32: ml.DType.F32, torch.float16: ml.DType.F16, torch.bfloat16: ml.DType.BF16}
_TORCH = {ours: theirs for theirs, ours in _DTYPES.items()}
_NAMES = ("float32", "float16", "bfloat16")


View = Callable[[torch.Tensor, Sequence[int], Sequence[int], int], torch.Tensor]
"""(whole, size, strides, offset) -> a view that begins ``offset`` elements after ``whole``."""


def _view(whole: torch.Tensor, size: Sequence[int], strides: Sequence[int], offset: int) -> torch.Tensor:
    return whole.as_strided(size, strides, whole.storage_offset() + offset)


class Bridge:
    """Conversion for one backend; by default through copies in host memory."""

    def __init__(self, view: View = _view) -> None:
        self.view = view

    def to_backend(self, ctx: ml.Context, array: torch.Tensor) -> ml.Tensor:
        if not array.is_floating_point():
            return ctx.from_numpy(array.cpu().numpy(), ml.DType.I32)
        wide = array.detach().cpu().to(torch.float32)
        return ctx.from_numpy(wide.numpy(), dtype_of(array.dtype))

    def to_torch(self, tensor: ml.Tensor, like: torch.Tensor) -> torch.Tensor:
        """As a torch tensor with the dtype and on the device of ``like``."""
        return torch.from_numpy(tensor.to_numpy().astype("float32")).to(like.device, like.dtype)

    def alias(self, tensor: ml.Tensor) -> torch.Tensor:
        """A tensor over the same memory; NotSupportedError if that is impossible."""
        raise ml.NotSupportedError(
            "HFCache: linear attention writes its states in place, which needs a backend in the same memory "
            "as the model: torch on its device, or numpy"
        )

    def aliases(self, ctx: ml.Context, like: torch.Tensor) -> bool:
        """Whether ``to_torch`` shares memory, for ``like`` of the tensor's dtype."""
        return False


class TorchBridge(Bridge):
    """PyTorch's own backend. K and V are on its device, which may differ from the model's."""

    def to_backend(self, ctx: Any, array: torch.Tensor) -> ml.Tensor:
        if array.device != ctx.torch_device:
            array = array.to(ctx.torch_device)
        tensor: ml.Tensor = ctx.from_native(array.detach() if array.requires_grad else array)
        return tensor

    def to_torch(self, tensor: ml.Tensor, like: torch.Tensor) -> torch.Tensor:
        native: torch.Tensor = tensor.native
        if native.dtype is like.dtype and native.device == like.device:
            return native
        return native.to(like.device, like.dtype)

    def alias(self, tensor: ml.Tensor) -> torch.Tensor:
        native: torch.Tensor = tensor.native
        return native

    def aliases(self, ctx: Any, like: torch.Tensor) -> bool:
        shared: bool = like.device == ctx.torch_device
        return shared


class NumpyBridge(Bridge):
    """NumPy, in the same host memory; BF16 has different dtypes in torch and NumPy."""

    def to_backend(self, ctx: ml.Context, array: torch.Tensor) -> ml.Tensor:
        array = array.detach().cpu()
        if array.dtype is torch.bfloat16:
            return ctx.from_native(array.contiguous().view(torch.int16).numpy().view(ml.DType.BF16.numpy))
        return ctx.from_native(array.numpy())

    def to_torch(self, tensor: ml.Tensor, like: torch.Tensor) -> torch.Tensor:
        return self.alias(tensor).to(like.device, like.dtype)

    def alias(self, tensor: ml.Tensor) -> torch.Tensor:
        native: Any = tensor.native
        if tensor.dtype is ml.DType.BF16:
            return torch.from_numpy(native.view("int16")).view(torch.bfloat16)
        return torch.from_numpy(native)

    def aliases(self, ctx: ml.Context, like: torch.Tensor) -> bool:
        return like.device.type == "cpu"


def bridge_to(backend: Any) -> Bridge:
    if backend.name == "torch":
        return TorchBridge(backend.strided_view)
    return NumpyBridge() if backend.name == "numpy" else Bridge()


def dtype_of(dtype: torch.dtype) -> ml.DType:
    """The DType of a model's activations. Raises NotSupportedError if there is none."""
    try:
        return _DTYPES[dtype]
    except KeyError:
        names = ", ".join(str(known) for known in _DTYPES)
        raise ml.NotSupportedError(f"HFCache: activations of {dtype}; a cache can store {names}") from None


def stored_dtype(dtype: HFDType | None) -> CacheFormat | None:
    """The storage format for a caller's ``dtype``; None: that of the first keys. Raises DTypeError for other
    values.
    """
    if dtype is None:
        return None
    requested = dtype if isinstance(dtype, tuple) else (dtype,)
    named = (getattr(torch, one) if one in _NAMES else one for one in requested)
    formats: Any = tuple(dtype_of(one) if isinstance(one, torch.dtype) else one for one in named)
    try:
        return CacheFormat.of(formats if isinstance(dtype, tuple) else formats[0])
    except ml.DTypeError as error:
        raise ml.DTypeError(
            f"HFCache: dtype={dtype!r:.60}; it must be an ml.DType, a torch.dtype, a storage format or its "
            f"name, or a pair of these ({error})"
        ) from error


def torch_dtype(dtype: ml.DType) -> torch.dtype:
    """The torch.dtype of a DType."""
    return _TORCH[dtype]
