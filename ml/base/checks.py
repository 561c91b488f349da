"""Checks of arguments that contexts and tensors share."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from ml.capabilities import CAUSAL, CausalMask
from ml.dtypes import DType
from ml.errors import DeviceError, DTypeError, MLError, ShapeError
from ml.protocols import Backend, Tensor
from ml.strided import Shape, broadcast_shapes

_BOUNDS: dict[DType, tuple[int, int]] = {
    dtype: (int(np.iinfo(dtype.numpy).min), int(np.iinfo(dtype.numpy).max))
    for dtype in (DType.I8, DType.U8, DType.I32, DType.I64)
} | {DType.BOOL: (0, 1)}


def number(op: str, name: str, value: Any) -> int | float:
    """``value`` as a Python number; a NumPy scalar would compute in its own dtype, in which integers wrap."""
    try:
        if getattr(value, "ndim", 0):
            raise TypeError("an array")
        math.isfinite(value)  # text is refused, even if float() could parse it
        if isinstance(value, float):
            return float(value)
        if isinstance(value, np.bool_):  # of which older versions of NumPy make an index with a warning
            return int(value)
        try:
            return int(operator.index(value))
        except TypeError:
            return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise DTypeError(f"{op}: {name}={value!r:.40}; it must be a number in the range of F64") from error


def element(op: str, name: str, value: Any, dtype: DType, signed: bool = False) -> int | float:
    """``value`` as an element of ``dtype``: rounded to a float, or refused if an integer dtype cannot
    represent it.

    ``signed`` allows negative values even for unsigned dtypes.
    """
    scalar = number(op, name, value)
    if dtype.is_float:
        whole = isinstance(scalar, int) and abs(scalar) < 1 << 63
        with np.errstate(all="ignore"):
            return float(cast_host(np.asarray(scalar if whole else float(scalar)), dtype))
    low, high = _BOUNDS[dtype]
    if signed:
        low = min(low, -high)
    if not math.isfinite(scalar) or scalar != int(scalar) or not low <= scalar <= high:
        raise DTypeError(f"{op}: {name}={value} does not fit {dtype!r}, a whole number in [{low}, {high}]")
    return int(scalar)


def truth(op: str, name: str, value: Any) -> bool:
    """``value`` as a bool; ShapeError for anything else, such as an array."""
    try:
        return bool(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ShapeError(f"{op}: {name}={value!r:.40}; it must be True or False") from error


def as_host(op: str, array: Any) -> np.ndarray:
    """Any array-like as a NumPy array in this machine's byte order."""
    try:
        host = np.asarray(array)
    except ValueError as error:  # rows of different lengths
        raise ShapeError(f"{op}: cannot make an array from {type(array).__name__}: {error}") from error
    except (TypeError, RuntimeError) as error:  # a framework's tensor that NumPy cannot read
        kind = f"{type(array).__module__}.{type(array).__name__}"
        raise DTypeError(
            f"{op}: NumPy cannot read a {kind}: {error}; pass a NumPy array, or call ctx.from_native for an "
            "array of the backend's own framework"
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
    """NumPy's cast, through float32 between integers and narrow floats.

    ml_dtypes rounds float64 to float32 first. So that rounding the result to bfloat16 equals rounding once,
    values between two float32 numbers are rounded to the one whose last bit is 1 (Boldo & Melquiond,
    "Emulation of FMA and correctly rounded sums", IEEE Trans. Computers 57, 2008).
    """
    if dtype in (DType.F16, DType.BF16) and host.dtype.kind in "iu":
        host = host.astype(np.float32)
    elif dtype is DType.BF16 and host.dtype == np.float64:
        narrow = host.astype(np.float32)
        bits = narrow.view(np.uint32) - (np.abs(narrow) > np.abs(host)) | (narrow != host)
        host = bits.view(np.float32)
    return host.astype(dtype.numpy)


def flat(values: tuple[Any, ...]) -> tuple[int, ...]:
    """Axes or sizes, passed one by one or as one sequence."""
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


def check_attention(
    op: str,
    backend: Backend | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | CausalMask | None,
    sinks: Tensor | None = None,
    *,
    batched: bool = False,
) -> None:
    """The checks that a backend's own attention must make first.

    Raises DeviceError for tensors of other backends, ShapeError or DTypeError unless the operands have one
    dtype and match as ``ml.SupportsAttention`` requires; ``batched``: as ``ml.SupportsPartialAttention``
    requires. With ``backend`` None, for ``ml.nn.attention``, they may belong to any backend, and the query
    may have any float dtype.
    """
    if backend is not None:
        check_peers(op, backend, query, key, value, None if mask is CAUSAL else mask, sinks)
    asked, keys, values = query.shape, key.shape, value.shape
    if not len(asked) == len(keys) == len(values) == 3 + batched:
        wanted = "(batch, tokens, heads, size)" if batched else "(tokens, heads, size)"
        raise ShapeError(f"{op}: query, key, value {asked}, {keys}, {values}; each must be {wanted}")
    tokens, heads, head_dim = asked[-3:]
    history, kv_heads = keys[-3:-1]
    if keys[-1] != head_dim or values[:-1] != keys[:-1] or (batched and keys[0] != asked[0]):
        batch = f"{asked[0]}, " if batched else ""
        raise ShapeError(
            f"{op}: query {asked}, key {keys}, value {values}; key must be ({batch}history, kv_heads, "
            f"{head_dim}) and value ({batch}history, kv_heads, v_dim)"
        )
    if kv_heads == 0 or heads % kv_heads:
        raise ShapeError(
            f"{op}: {heads} heads over {kv_heads} KV heads; heads must be a multiple of the KV heads"
        )
    if history == 0:
        raise ShapeError(f"{op}: the history has no keys; put keys before attending")
    if not query.dtype.is_float or not key.dtype.is_float or value.dtype is not key.dtype:
        raise DTypeError(
            f"{op}: query {query.dtype!r}, key {key.dtype!r}, value {value.dtype!r}; "
            "they must be floats, and key and value must have the same dtype"
        )
    if backend is not None and query.dtype is not key.dtype:
        raise DTypeError(
            f"{op}: query {query.dtype!r}, key {key.dtype!r}; they must have the same dtype; cast the query"
        )
    if mask is not None:
        check_mask(op, mask, tokens, history, asked[0] if batched else None)
    if sinks is not None and (sinks.shape != (heads,) or not sinks.dtype.is_float):
        raise ShapeError(f"{op}: sinks {sinks.dtype!r} {sinks.shape}; they must be floats ({heads},)")


def check_mask(
    op: str, mask: Tensor | CausalMask, tokens: int, history: int, batch: int | None = None
) -> None:
    """Raise ShapeError or DTypeError unless ``mask`` fits the numbers of queries, keys and batches."""
    if mask is CAUSAL:
        if history < tokens:
            raise ShapeError(
                f"{op}: CAUSAL with {tokens} queries and {history} keys; some queries would see none"
            )
        return
    shape = mask.shape
    batches = shape[:-2] in ((1,), (batch,)) if batch is not None else len(shape) == 2
    if not batches or shape[-2] < tokens or shape[-1] != history:
        some = "" if batch is None else f"{batch} or 1, "
        raise ShapeError(f"{op}: mask {shape}; it must be ({some}rows >= {tokens}, {history})")
    if not mask.dtype.is_float:
        raise DTypeError(f"{op}: mask {mask.dtype!r}; it must be additive: F32, F16 or BF16")


def check_peers(op: str, backend: Backend, *tensors: object) -> None:
    """Raise DeviceError or DTypeError unless all arguments are None or tensors of ``backend``."""
    for tensor in tensors:
        if tensor is not None and getattr(tensor, "backend", None) is not backend:
            raise foreign(op, tensor, backend)


def foreign(op: str, tensor: object, backend: Backend) -> MLError:
    """The error for a tensor that is not one of ``backend``."""
    owner = getattr(tensor, "backend", None)
    if owner is not None:
        return DeviceError(
            f"{op}: a tensor of {owner!r} where {backend!r} works; copy it with "
            "ctx.from_numpy(tensor.to_numpy())"
        )
    return DTypeError(f"{op}: {type(tensor).__name__} is not a tensor of backend {backend.name!r}")
