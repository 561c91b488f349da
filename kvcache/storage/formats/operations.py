"""Building blocks of formats, made of operations that every backend with compute has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeGuard

import ml
from kvcache.cache import InvalidRangeError
from ml import nn


def check_blocks(name: str, block: int, dim: int) -> None:
    """Raise InvalidRangeError unless heads of ``dim`` divide into blocks."""
    if dim % block or dim <= 0:
        smaller = "with blocks of 32 (AFFINE4_32, AFFINE8_32, Q8_0, Q4_0) or " if dim % 32 == 0 < dim else ""
        raise InvalidRangeError(
            f"put: head_dim {dim} in a cache of {name}, whose blocks are {block} values along head_dim, "
            f"which must divide it; choose a format {smaller}without blocks (F8_E4M3, F16)"
        )


def quantized_by(ctx: ml.Context, x: ml.Tensor, name: str) -> tuple[ml.Tensor, ...] | None:
    """The parts computed by the backend; None if it leaves this format to the generic implementation."""
    backend = getattr(ctx, "backend", None)
    return backend.quantize(ctx, x, name) if by_backend(backend) else None


def read_by(ctx: ml.Context, parts: Sequence[ml.Tensor], name: str) -> ml.Tensor | None:
    """The values decoded by the backend; None if it leaves this format to the generic implementation."""
    backend = getattr(ctx, "backend", None)
    return backend.dequantize(ctx, parts, name) if by_backend(backend) else None


def by_backend(backend: ml.Backend | None) -> TypeGuard[ml.SupportsKVStorage]:
    return nn.offers(backend, ml.SupportsKVStorage)


def number(ctx: ml.Context, value: float) -> ml.Tensor:
    """F32 (1,)."""
    return ctx.full((1,), value, ml.DType.F32)


def select(ctx: ml.Context, which: ml.Tensor, one: ml.Tensor | float, other: ml.Tensor | float) -> ml.Tensor:
    """``one`` where the BOOL tensor ``which`` is true, else ``other``."""
    chosen = [number(ctx, x) if isinstance(x, float) else x for x in (one, other)]
    return which.where(ctx, *chosen)


def inverse(ctx: ml.Context, scale: ml.Tensor) -> ml.Tensor:
    """1 / scale, and 0 where that is not finite, because casting infinity to an integer depends on the
    processor.
    """
    reciprocal = number(ctx, 1.0).div(ctx, scale)
    return select(ctx, reciprocal.abs(ctx).compare(ctx, "lt", number(ctx, math.inf)), reciprocal, 0.0)


def same_sign(ctx: ml.Context, x: ml.Tensor, size: float) -> ml.Tensor:
    """``size`` with the sign of x."""
    return select(ctx, x.compare(ctx, "ge", number(ctx, 0.0)), size, -size)
