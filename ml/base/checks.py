"""Checks of arguments that contexts and tensors share."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ml.dtypes import DType
from ml.errors import DeviceError, DTypeError, MLError, ShapeError
from ml.protocols import Backend
from ml.strided import Shape, broadcast_shapes

_BOUNDS: dict[DType, tuple[int, int]] = {
    dtype: (int(np.iinfo(dtype.numpy).min), int(np.iinfo(dtype.numpy).max))
    for dtype in (DType.I8, DType.U8, DType.I32, DType.I64)
} | {DType.BOOL: (0, 1)}


def check_representable(op: str, name: str, value: float, dtype: DType, signed: bool = False) -> None:
    try:
        finite = math.isfinite(value)
    except (TypeError, OverflowError) as error:
        raise DTypeError(f"{op}: {name}={value!r:.40}; it must be a number in the range of F64") from error
    if dtype.is_float:
        return
    low, high = _BOUNDS[dtype]
    if signed:
        low = min(low, -high)
    if not finite or value != int(value) or not low <= value <= high:
        raise DTypeError(f"{op}: {name}={value} does not fit {dtype!r}, a whole number in [{low}, {high}]")


def as_host(op: str, array: Any) -> np.ndarray:
    """Any array-like as a NumPy array in this machine's byte order."""
    try:
        host = np.asarray(array)
    except ValueError as error:  # rows of different lengths
        raise ShapeError(f"{op}: cannot make an array from {type(array).__name__}: {error}") from error
    except (TypeError, RuntimeError) as error:  # of a framework, whose tensor NumPy cannot read
        kind = f"{type(array).__module__}.{type(array).__name__}"
        raise DTypeError(
            f"{op}: NumPy cannot read a {kind}: {error}; pass an array of NumPy, or call ctx.from_native for "
            "one of the backend's own framework"
        ) from error
    return host if host.dtype.isnative else host.astype(host.dtype.newbyteorder("="))


def as_raw(op: str, data: Any) -> np.ndarray:
    """The bytes of a buffer, without a copy."""
    try:
        return np.frombuffer(data, dtype=np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise DTypeError(
            f"{op}: {type(data).__name__} is not a contiguous buffer of bytes: {error}"
        ) from error


def cast_host(host: np.ndarray, dtype: DType) -> np.ndarray:
    """NumPy's cast, by way of float32 between integers and the narrow floats."""
    if dtype in (DType.F16, DType.BF16) and host.dtype.kind in "iu":
        host = host.astype(np.float32)
    return host.astype(dtype.numpy)


def flat(values: tuple[Any, ...]) -> tuple[int, ...]:
    """Axes or sizes given one by one, or as one sequence."""
    return tuple(values[0]) if len(values) == 1 and isinstance(values[0], (tuple, list)) else values


def check_matmul(a: Shape, b: Shape) -> None:
    if not a or not b:
        raise ShapeError(f"matmul: {a} by {b}; a scalar has no axis to multiply over")
    if a[-1] != (b[-2] if len(b) > 1 else b[0]):
        raise ShapeError(
            f"matmul: {a} by {b}; the last axis of the first must equal the next-to-last axis of the second"
        )
    if len(a) > 2 or len(b) > 2:
        broadcast_shapes("matmul", a[:-2], b[:-2])


def foreign(op: str, tensor: object, backend: Backend) -> MLError:
    """The error for a tensor that is not one of ``backend``."""
    owner = getattr(tensor, "backend", None)
    if owner is not None:
        return DeviceError(
            f"{op}: a tensor of {owner!r} where {backend!r} works; copy it with "
            "ctx.from_numpy(tensor.to_numpy())"
        )
    return DTypeError(f"{op}: {type(tensor).__name__} is not a tensor of backend {backend.name!r}")
