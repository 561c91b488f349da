"""Transfers between a device and host memory, by the backend's own method or the generic one."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np

from ml.capabilities import PageTransfer, SupportsHostMemory, SupportsTransfers
from ml.errors import DeviceError, DTypeError, ReadOnlyError, ShapeError
from ml.protocols import Backend, Context, Tensor
from ml.strided import overlaps_itself


class _Done:
    """The transfer of a backend that copies synchronously."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """Nothing to wait for."""

    join = wait


def in_host_memory(backend: Backend) -> bool:
    """Whether all tensors of a backend lie in host memory, so that copies to it are made by the processor."""
    return isinstance(backend, SupportsHostMemory) and all(one.kind == "cpu" for one in backend.devices)


def pinned_memory(backend: Backend, nbytes: int) -> np.ndarray:
    """Uninitialized host memory, uint8 (nbytes,), page-locked if ``backend`` provides it."""
    memory = None
    if isinstance(backend, SupportsTransfers):
        with contextlib.suppress(DeviceError):  # else pageable memory, which is slower
            memory = backend.pinned_memory(nbytes)
    return np.empty(nbytes, np.uint8) if memory is None else memory


def page_out(
    backend: Backend, ctx: Context, tensors: Sequence[Tensor]
) -> tuple[list[np.ndarray], PageTransfer]:
    """Begin to copy tensors to new C-contiguous arrays, which are valid when the transfer has finished.

    Uses ``ml.SupportsTransfers``, whose rules apply until then, or ``to_numpy``, synchronously.
    """
    begun = None
    if isinstance(backend, SupportsTransfers):
        with contextlib.suppress(DeviceError):  # as in pinned_memory; a failed device raises again
            begun = backend.page_out(ctx, tensors)
    if begun is not None:
        return begun
    return [np.asarray(tensor.to_numpy(), order="C") for tensor in tensors], _Done()


def page_in(
    backend: Backend, ctx: Context, arrays: Sequence[np.ndarray], tensors: Sequence[Tensor]
) -> PageTransfer:
    """Begin to copy arrays to tensors of the same shapes and dtypes, in the same way as ``page_out``."""
    for array, tensor in zip(arrays, tensors, strict=True):
        if array.shape != tensor.shape:
            raise ShapeError(
                f"page_in: an array {array.shape} for a tensor {tensor.shape}; the shapes must be equal"
            )
        if array.dtype != tensor.dtype.numpy:
            raise DTypeError(
                f"page_in: an array of {array.dtype} for {tensor.dtype!r}; a page is not converted to "
                "another dtype"
            )
        if overlaps_itself(tensor.shape, tensor.strides):
            raise ReadOnlyError(f"page_in: elements of {tensor.shape} {tensor.strides} share memory")
    begun = backend.page_in(ctx, arrays, tensors) if isinstance(backend, SupportsTransfers) else None
    if begun is not None:
        return begun
    for array, tensor in zip(arrays, tensors, strict=True):
        ctx.forward(ctx.from_numpy(array, tensor.dtype).copy(ctx, tensor))
    ctx.compute()
    return _Done()
