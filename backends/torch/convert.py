"""Conversion between torch's dtypes, arrays and errors and ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from backends.uploads import STAGED_BYTES, fill, lay_out
from ml.dtypes import DType
from ml.errors import BoundsError, DeviceError, MLError
from ml.strided import extent

TO_TORCH: dict[DType, torch.dtype] = {
    DType.F32: torch.float32,
    DType.F16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.I8: torch.int8,
    DType.U8: torch.uint8,
    DType.I32: torch.int32,
    DType.I64: torch.int64,
    DType.BOOL: torch.bool,
}
FROM_TORCH = {native: dtype for dtype, native in TO_TORCH.items()}


def to_host(array: torch.Tensor, dtype: DType) -> np.ndarray:
    """A C-contiguous host copy, in memory of NumPy's, which asks for large pages: half the time of torch's.

    bfloat16 is passed as integers, since torch does not convert it for NumPy.
    """
    host = np.empty(array.shape, dtype.numpy)
    bits = host.view(np.int16) if dtype is DType.BF16 else host
    torch.from_numpy(bits).view(array.dtype).copy_(array)
    return host


def takes(array: np.ndarray) -> bool:
    """Whether torch accepts the array's own memory: it is writable, and all strides, even of axes of size 1,
    are non-negative multiples of the item size.
    """
    steps = array.strides
    return array.flags.writeable and all(step >= 0 and not step % array.itemsize for step in steps)


def fill_from_host(array: torch.Tensor, host: np.ndarray, dtype: DType) -> None:
    """Write a host array of the same shape and dtype into new, contiguous storage."""
    if dtype is DType.BF16:
        array, host = array.view(torch.int16), host.view(np.int16)
    if array.is_cpu:
        array.numpy()[...] = host
        return
    source = torch.from_numpy(np.array(host, order="C"))  # a copy: torch warns of read-only arrays
    if array.is_cuda and array.nbytes <= STAGED_BYTES:
        array.copy_(source.pin_memory(), non_blocking=True)
    else:
        array.copy_(source)


def pack(arrays: Sequence[tuple[np.ndarray, DType]]) -> tuple[torch.Tensor, list[int]]:
    """Arrays of these dtypes, concatenated in pinned memory, and the byte offset of each."""
    hosts, starts, nbytes = lay_out(arrays)
    packed = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    fill(packed.numpy(), hosts, starts)
    return packed, starts


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the runs of memory from first to last element overlap: may be True without an actual
    overlap.
    """
    if a.device != b.device:
        return False
    if a.device.type == "mps":  # its data_ptr is not an address, only equal for one storage
        return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    first, second = a.data_ptr(), b.data_ptr()
    return first < second + _bytes(b) and second < first + _bytes(a)


def _bytes(array: torch.Tensor) -> int:
    return extent(tuple(array.size()), array.stride()) * array.element_size()


def write(array: torch.Tensor, method: Callable[..., object], *args: object) -> None:
    """Call a writing method of ``array``; one created in inference mode can be written only there."""
    if array.is_inference() and not torch.is_inference_mode_enabled():
        with torch.inference_mode():
            method(*args)
    else:
        method(*args)


def exactly(product: Callable[..., torch.Tensor], *operands: torch.Tensor) -> torch.Tensor:
    """A product of F16 or BF16 on CUDA, accumulated in F32: by default, torch rounds partial sums. The
    settings are global to the process, and are restored immediately.
    """
    settings: Any = torch.backends.cuda.matmul
    half = operands[0].dtype is torch.float16
    reduced = f"allow_{'fp16' if half else 'bf16'}_reduced_precision_reduction"
    before, accumulated = getattr(settings, reduced), half and settings.allow_fp16_accumulation
    split = getattr(settings, f"{reduced}_split_k", True)  # from torch 2.10 on; set together
    if before:
        setattr(settings, reduced, False if split else (False, False))
    if accumulated:
        settings.allow_fp16_accumulation = False
    try:
        return product(*operands)
    finally:
        if before:
            setattr(settings, reduced, True if split else (True, False))
        if accumulated:
            settings.allow_fp16_accumulation = True


def translated(op: str, error: Exception, device: str) -> MLError:
    """torch's error as one of ours. torch's out-of-memory message contains the bytes."""
    if isinstance(error, MLError):
        return error
    reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
    if isinstance(error, IndexError):
        return BoundsError(f"{op}: {reason}")
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in reason:
        return DeviceError(f"{op}: out of memory on {device}: {reason}")
    return DeviceError(f"{op}: torch failed on {device}: {reason}")
