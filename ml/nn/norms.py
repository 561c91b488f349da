"""Normalisation over the last axis."""

from __future__ import annotations

from ml.dtypes import DType
from ml.errors import ShapeError
from ml.protocols import Context, Tensor

__all__ = ["l2_norm", "layer_norm", "rms_norm"]


def rms_norm(ctx: Context, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """``x / sqrt(mean(x**2) + eps) * weight`` (Zhang & Sennrich, 2019); weight (size,)."""
    return x.rms_norm(ctx, weight, eps)


def layer_norm(ctx: Context, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` (Ba et al., 2016); weight and bias (size,).

    Computed in F32 and rounded once to x's dtype. With the mean taken off, the variance is the
    mean square: what is left is an RMSNorm.
    """
    wide = _wide(ctx, x)
    centred = wide.sub(ctx, wide.mean(ctx, -1, keepdims=True))
    result = centred.rms_norm(ctx, None if weight is None else _wide(ctx, weight), eps)
    if bias is not None:
        result = result.add(ctx, _wide(ctx, bias))
    return result if x.dtype is DType.F32 else result.cast(ctx, x.dtype)


def l2_norm(ctx: Context, x: Tensor, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(sum(x**2) + eps)`` over the last axis: a scaled RMSNorm."""
    size = x.shape[-1] if x.shape else 0
    if not size:
        raise ShapeError(f"l2_norm: {x.shape}; the last axis must have at least one element")
    return x.rms_norm(ctx, None, eps / size).scale(ctx, size**-0.5)


def _wide(ctx: Context, x: Tensor) -> Tensor:
    return x if x.dtype is DType.F32 else x.cast(ctx, DType.F32)
