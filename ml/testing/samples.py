"""Values, layouts and an exact reference for conversions, independent of the code under test."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ml.dtypes import DType
from ml.protocols import Context, Tensor

FLOATS = (DType.F32, DType.F16, DType.BF16)
INTEGERS = (DType.I8, DType.U8, DType.I32, DType.I64)
DTYPES = (*FLOATS, *INTEGERS, DType.BOOL)

_FORMATS = {DType.F32: (24, -126), DType.F16: (11, -14), DType.BF16: (8, -126)}
"""The significant bits, and the exponent of the smallest normal number."""
_WIDTHS = {DType.I8: (8, True), DType.U8: (8, False), DType.I32: (32, True), DType.I64: (64, True)}


def counting(shape: tuple[int, ...], dtype: DType, start: int = 0) -> np.ndarray:
    """start, start + 1, ... within the integers that ``dtype`` represents exactly (BOOL: a fixed pattern)."""
    count = np.arange(start, start + math.prod(shape))
    values = (count * count + count // 3) % 2 if dtype is DType.BOOL else count % 120
    return values.reshape(shape).astype(dtype.numpy)


def in_records(values: np.ndarray) -> np.ndarray:
    """The same values in memory whose strides are not multiples of the item size."""
    column: np.ndarray = np.zeros(values.shape, [("value", values.dtype), ("flag", np.uint8)])["value"]
    column[...] = values
    return column


def normal(shape: tuple[int, ...], dtype: DType, seed: int = 0, spread: float = 2.0) -> np.ndarray:
    """Random values that ``dtype`` represents exactly, in that dtype."""
    return np.asarray(np.random.default_rng(seed).standard_normal(shape) * spread).astype(dtype.numpy)


def exact(array: np.ndarray) -> np.ndarray:
    """The values in float64, which represents all floats and tested integers exactly."""
    with np.errstate(invalid="ignore"):
        return array.astype(np.float64)


def float_limits(dtype: DType) -> Any:
    """``numpy.finfo`` of a float dtype, BF16 too."""
    return ml_dtypes.finfo(dtype.numpy)  # type: ignore[no-untyped-call]


def positions(offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """The positions of a view's elements in the storage, from the definition of strides."""
    where = np.full(shape, offset)
    for index, stride in zip(np.indices(shape), strides, strict=True):
        where = where + index * stride
    return where


# Conversions.


@functools.cache
def _power(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


def _round_float(value: Fraction, dtype: DType) -> float:
    """The nearest representable number: ties to even, overflow to infinity; in exact arithmetic."""
    precision, lowest = _FORMATS[dtype]
    if value == 0:
        return 0.0
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if _power(exponent) > size:
        exponent -= 1
    quantum = _power(max(exponent, lowest) - precision + 1)
    rounded = round(size / quantum) * quantum  # round() of a Fraction rounds ties to even
    largest = (2 - _power(1 - precision)) * _power(1 - lowest)
    result = math.inf if rounded > largest else float(rounded)
    return math.copysign(result, value)


def _convert_one(value: float | int, source: DType, target: DType) -> float | int:
    if target is DType.BOOL:
        return value != 0
    if target.is_float:
        if isinstance(value, float) and (math.isnan(value) or math.isinf(value) or value == 0):
            return value
        if source.is_integer and target is not DType.F32:  # integers become narrow floats by way of F32
            return _convert_one(_round_float(Fraction(value), DType.F32), DType.F32, target)
        return _round_float(Fraction(value), target)
    width, signed = _WIDTHS[target]
    whole = int(value) % (1 << width)  # integers wrap; floats are in range here and are truncated
    return whole - (1 << width) if signed and whole >> (width - 1) else whole


def _encode(values: list[float | int], dtype: DType) -> np.ndarray:
    """Exact values as an array; every float is representable here, so nothing is rounded."""
    if dtype is DType.BF16:
        narrow = np.array(values, dtype=np.float32)
        return (narrow.view(np.uint32) >> 16).astype(np.uint16).view(dtype.numpy)
    return np.array(values, dtype=dtype.numpy)


def _decode(array: np.ndarray, dtype: DType) -> list[float | int]:
    if dtype is DType.BF16:
        array = (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return list(array.ravel().tolist())


@functools.cache
def converted(source: DType, target: DType) -> tuple[np.ndarray, np.ndarray]:
    """Values of ``source``, and the same values converted to ``target``, where the contract defines them."""
    values = special_values(source)
    kept = [_defined(value, target) for value in _decode(values, source)]
    values = values[np.array(kept)]
    results = [_convert_one(value, source, target) for value in _decode(values, source)]
    return values, _encode(results, target)


def _defined(value: float | int, target: DType) -> bool:
    """Converting a float outside an integer's range, or NaN to an integer or BOOL, is unspecified."""
    if not isinstance(value, float) or target.is_float:
        return True
    if target is DType.BOOL:
        return not math.isnan(value)
    if not math.isfinite(value):
        return False
    width, signed = _WIDTHS[target]
    low, high = (-(1 << (width - 1)), (1 << (width - 1)) - 1) if signed else (0, (1 << width) - 1)
    return low <= math.trunc(value) <= high


@functools.cache
def special_values(dtype: DType) -> np.ndarray:
    """The critical cases of conversions: ties, subnormals, limits, infinities, NaN."""
    if dtype is DType.BOOL:
        return np.array([False, True, True, False, True])
    if dtype.is_integer:
        return _special_integers(dtype)
    if dtype is DType.F32:
        return _special_f32()
    comb = np.arange(0, 1 << 16, 97, dtype=np.uint16)  # spread over all bit patterns
    edges = [
        0x0001,
        0x03FF,
        0x0400,
        0x007F,
        0x0080,
        0x7BFF,
        0x7C00,
        0x7E00,
        0x7F7F,
        0x7F80,
        0x7FC0,
        0x477F,
        0x4780,
    ]
    both = np.array([*edges, *(edge | 0x8000 for edge in (0, *edges))], dtype=np.uint16)
    return np.concatenate([comb, both]).view(dtype.numpy)


def _special_integers(dtype: DType) -> np.ndarray:
    info = np.iinfo(dtype.numpy)
    numbers = {0, 1, 2, 3, 7, 100, 127, info.min, info.min + 1, info.max, info.max - 1}
    for power in range(2, 64):
        for step in (-(1 << max(power - 9, 0)), -3, -1, 0, 1, 3, 1 << max(power - 9, 0)):
            numbers |= {(1 << power) + step, -(1 << power) - step}
    numbers |= {2049, 2051, 65503, 65519, 65520, 65521, 257, 259, 16777217, 16777219}
    return np.array(sorted(n for n in numbers if info.min <= n <= info.max), dtype=dtype.numpy)


def _special_f32() -> np.ndarray:
    """Numbers around every tie of F16 and BF16, one unit in the last place of F32 apart."""
    exponents = (0, 1, 90, 102, 103, 104, 112, 113, 120, 127, 128, 141, 142, 150, 200, 253, 254, 255)
    mantissas = (0, 1, 0x1000, 0x3000, 0x7000, 0x8000, 0x18000, 0x28000, 0x400000, 0x7FE000, 0x7FF000,
                 0x7F8000, 0x7FFFFF)  # fmt: skip
    fields = [
        exponent << 23 | mantissa + step
        for exponent, mantissa, step in itertools.product(exponents, mantissas, (-1, 0, 1))
        if 0 <= mantissa + step < 1 << 23
    ]
    raw = np.array(fields, dtype=np.uint32)
    plain = np.array(
        [0.5, 1.5, 2.5, 0.9999, 126.99, 255.5, 2147483520.0, 65519.996, 65520.0, 1e10], np.float32
    )
    both = np.concatenate([raw.view(np.float32), plain])
    return np.concatenate([both, -both])


# Layouts.


class Placed(NamedTuple):
    """A tensor that shows some values, and a tensor over its whole storage."""

    tensor: Tensor
    base: Tensor
    where: np.ndarray
    """The position of each element of the tensor in the storage."""


def _place(ctx: Context, values: np.ndarray, where: np.ndarray, size: int) -> Tensor:
    dtype = DType.from_numpy(values.dtype)
    host = counting((size,), dtype, start=5)
    host[where.ravel()] = values.ravel()
    return ctx.from_numpy(host)


def _contiguous(ctx: Context, values: np.ndarray) -> Placed:
    where = np.arange(values.size).reshape(values.shape)
    base = _place(ctx, values, where, values.size)
    return Placed(base.reshape(ctx, *values.shape), base, where)


def _offset(ctx: Context, values: np.ndarray) -> Placed:
    where = 3 + np.arange(values.size).reshape(values.shape)
    base = _place(ctx, values, where, values.size + 5)
    return Placed(base.view(ctx, 3, values.shape), base, where)


def _permuted(ctx: Context, values: np.ndarray) -> Placed:
    back = values.shape[::-1]
    where = np.arange(values.size).reshape(back).transpose()
    base = _place(ctx, values, where, values.size)
    return Placed(base.reshape(ctx, *back).permute(ctx, *reversed(range(values.ndim))), base, where)


def _stepped(ctx: Context, values: np.ndarray) -> Placed:
    """Every second element of the last axis, with a gap after each row."""
    wide = (values.shape[0] + 1, *values.shape[1:-1], values.shape[-1] * 2 + 1)
    grid = np.arange(math.prod(wide)).reshape(wide)
    where = grid[1:, ..., 1::2]
    base = _place(ctx, values, where, grid.size)
    rows = base.reshape(ctx, *wide).slice(ctx, 0, 1, wide[0])
    return Placed(rows.slice(ctx, values.ndim - 1, 1, wide[-1], 2), base, where)


def _interleaved(ctx: Context, values: np.ndarray) -> Placed:
    """Interleaved rows: strides that no reshape of the storage has."""
    count, width = values.shape[0], math.prod(values.shape[1:])
    where = (np.arange(count)[:, None] + np.arange(width) * (count + 1)).reshape(values.shape)
    base = _place(ctx, values, where, count * 2 + width * (count + 1))
    strides = [(count + 1) * math.prod(values.shape[axis + 1 :]) for axis in range(values.ndim)]
    return Placed(base.view(ctx, 0, values.shape, (1, *strides[1:])), base, where)


Place = Callable[[Context, np.ndarray], Placed]

LAYOUTS: dict[str, Place] = {
    "contiguous": _contiguous,
    "offset": _offset,
    "permuted": _permuted,
    "stepped": _stepped,
    "interleaved": _interleaved,
}
"""Layouts of two or more axes in memory in which no elements overlap."""
