"""Linear maps, embeddings and gated units."""

from __future__ import annotations

from ml.dtypes import DType
from ml.errors import ShapeError
from ml.protocols import Context, Indices, Tensor

__all__ = ["embedding", "linear", "swiglu"]


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
    wide = x if x.dtype is DType.F32 else x.cast(ctx, DType.F32)
    one = ctx.full((1,), 1.0, DType.F32)
    return wide.relu(ctx).add(ctx, wide.abs(ctx).neg(ctx).exp(ctx).add(ctx, one).log(ctx))


def swiglu(ctx: Context, gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` (Shazeer, "GLU Variants Improve Transformer", 2020)."""
    return gate.silu(ctx).mul(ctx, up)
