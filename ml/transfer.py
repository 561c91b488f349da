"""Pages between a device and host memory: the backend's own way, or the generic one."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np

from ml.capabilities import PageTransfer, SupportsTransfers
from ml.errors import DeviceError, DTypeError, ReadOnlyError, ShapeError
from ml.protocols import Backend, Context, Tensor
from ml.strided import overlaps_itself


class _Done:
    """The transfer of a backend that copies at once."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """Nothing is under way."""

    join = wait


def pinned_memory(backend: Backend, nbytes: int) -> np.ndarray:
    """Host memory, uint8 (nbytes,), that holds anything: page-locked where ``backend`` has some to give."""
    memory = None
    if isinstance(backend, SupportsTransfers):
        with contextlib.suppress(DeviceError):  # it has no more: other memory does as well, and more slowly
            memory = backend.pinned_memory(nbytes)
    return np.empty(nbytes, np.uint8) if memory is None else memory


def page_out(
    backend: Backend, ctx: Context, tensors: Sequence[Tensor]
) -> tuple[list[np.ndarray], PageTransfer]:
    """Begin to copy tensors to new C-contiguous arrays, which hold them when the transfer is done.

    By ``ml.SupportsTransfers``, whose rules hold until then; else by ``to_numpy``, at once.
    """
    begun = None
    if isinstance(backend, SupportsTransfers):
        with contextlib.suppress(DeviceError):  # as in pinned_memory; a device that failed says so again
            begun = backend.page_out(ctx, tensors)
    if begun is not None:
        return begun
    return [np.asarray(tensor.to_numpy(), order="C") for tensor in tensors], _Done()


def page_in(
    backend: Backend, ctx: Context, arrays: Sequence[np.ndarray], tensors: Sequence[Tensor]
) -> PageTransfer:
    """Begin to write arrays over tensors of the same shapes and dtypes, else refused; as ``page_out``."""
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
