"""Linear maps, embeddings, gated units and norms over the last axis."""

from __future__ import annotations

from ml.dtypes import DType
from ml.errors import ShapeError
from ml.nn.attention import widened
from ml.protocols import Context, Indices, Tensor


def linear(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: x (..., in), weight (out, in) as checkpoints store it, bias (out,)."""
    if len(weight.shape) != 2 or not x.shape or x.shape[-1] != weight.shape[1]:
        raise ShapeError(
            f"linear: x {x.shape} by weight {weight.shape}; they must be (..., in) and (out, in)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"linear: bias {bias.shape} for weight {weight.shape}; it must be (out,)")
    result = x.matmul(ctx, weight.permute(ctx, 1, 0))
    return result if bias is None else result.add(ctx, bias)


def embedding(ctx: Context, weight: Tensor, ids: Indices) -> Tensor:
    """Rows of weight (vocabulary, size) at ids (tokens,): checked on the host, or an I32 tensor."""
    if len(weight.shape) != 2:
        raise ShapeError(f"embedding: weight {weight.shape}; it must be (vocabulary, size)")
    return weight.rows(ctx, ids)


def softplus(ctx: Context, x: Tensor) -> Tensor:
    """``log(1 + exp(x))``, without overflow; F32."""
    wide = widened(ctx, x)
    one = ctx.full((1,), 1.0, DType.F32)
    return wide.relu(ctx).add(ctx, wide.abs(ctx).neg(ctx).exp(ctx).add(ctx, one).log(ctx))


def swiglu(ctx: Context, gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` (Shazeer, "GLU Variants Improve Transformer", 2020)."""
    return gate.silu(ctx).mul(ctx, up)


def rms_norm(ctx: Context, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """``x / sqrt(mean(x**2) + eps) * weight`` (Zhang & Sennrich, 2019); weight (size,)."""
    return x.rms_norm(ctx, weight, eps)


def layer_norm(ctx: Context, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` (Ba et al., 2016); weight and bias (size,).

    Computed in F32 and rounded once to x's dtype. After subtracting the mean, the variance is the mean
    square, so the rest is an RMSNorm.
    """
    wide = widened(ctx, x)
    centred = wide.sub(ctx, wide.mean(ctx, -1, keepdims=True))
    result = centred.rms_norm(ctx, None if weight is None else widened(ctx, weight), eps)
    if bias is not None:
        result = result.add(ctx, widened(ctx, bias))
    return result if x.dtype is DType.F32 else result.cast(ctx, x.dtype)


def l2_norm(ctx: Context, x: Tensor, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(sum(x**2) + eps)`` over the last axis: a scaled RMSNorm."""
    size = x.shape[-1] if x.shape else 0
    if not size:
        raise ShapeError(f"l2_norm: {x.shape}; the last axis must have at least one element")
    return x.rms_norm(ctx, None, eps / size).scale(ctx, size**-0.5)
