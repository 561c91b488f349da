"""Operations along an axis for recurrences and samplers: running sums, padding, causal convolutions."""

from __future__ import annotations

import math

from ml.dtypes import DType
from ml.errors import ShapeError
from ml.nn.attention import widened
from ml.protocols import Context, Tensor
from ml.strided import normalize_axis


def cumsum(ctx: Context, x: Tensor) -> Tensor:
    """F32 running sums along the last axis, of x's shape. Numbers must be finite: others affect their whole
    row.

    Computed in blocks of about the square root of the axis, so that small numbers are not lost in large sums.
    """
    if not x.shape:
        raise ShapeError("cumsum: a tensor without axes; it must have at least one")
    *leading, count = x.shape
    rows = math.prod(leading)
    wide = widened(ctx, x)
    if not rows or not count:
        return wide.contiguous(ctx)
    size = 1 << math.ceil(math.log2(count) / 2)
    blocks = -(-count // size)
    padded = pad(ctx, wide.contiguous(ctx).reshape(ctx, rows, count), 1, after=blocks * size - count)
    places = ctx.arange(0, size, 1, DType.F32)
    column, row = places.reshape(ctx, size, 1), places.reshape(ctx, 1, size)
    upto = column.compare(ctx, "<=", row).cast(ctx, DType.F32)
    inner = padded.reshape(ctx, rows * blocks, size).matmul(ctx, upto).reshape(ctx, rows, blocks, size)
    if blocks > 1:
        totals = inner.slice(ctx, 2, size - 1, size).reshape(ctx, rows, blocks)
        through = totals.matmul(ctx, upto.slice(ctx, 0, 0, blocks).slice(ctx, 1, 0, blocks))
        inner = inner.add(ctx, through.sub(ctx, totals).reshape(ctx, rows, blocks, 1))
    sums = inner.reshape(ctx, rows, blocks * size)
    if blocks * size > count:
        sums = sums.slice(ctx, 1, 0, count).contiguous(ctx)
    return sums.reshape(ctx, *leading, count)


def pad(ctx: Context, x: Tensor, axis: int, before: int = 0, after: int = 0, value: float = 0.0) -> Tensor:
    """x with ``before`` and ``after`` additional elements of ``value`` along an axis; x itself if both are 0.

    Raises ShapeError for a negative count, and for an axis that x does not have.
    """
    axis = normalize_axis("pad", axis, len(x.shape))
    if before < 0 or after < 0:
        raise ShapeError(f"pad: {before} before and {after} after; they must be at least 0")
    for count, first in ((before, True), (after, False)):
        if count:
            shape = list(x.shape)
            shape[axis] = count
            edge = ctx.full(tuple(shape), value, x.dtype)
            x = edge.concat(ctx, x, axis) if first else x.concat(ctx, edge, axis)
    return x


def causal_conv1d(
    ctx: Context, x: Tensor, state: Tensor, kernel: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The depthwise causal convolution of Mamba and Gated DeltaNet.

    x (sequences, tokens, channels); ``state`` (sequences, channels, taps - 1): the previous inputs, oldest
    first, as a RecurrentCache keeps them; ``kernel`` (taps, channels), oldest tap first; ``bias``
    (channels,). Returns the result, of x's shape and dtype, and all inputs (sequences, taps - 1 + tokens,
    channels): the state after n of the tokens is ``inputs.slice(ctx, 1, n, n + taps - 1)`` with its last two
    axes permuted.

    Raises ShapeError for incompatible shapes.
    """
    (sequences, tokens, channels), taps = x.shape, kernel.shape[0]
    if kernel.shape != (taps, channels) or state.shape != (sequences, channels, taps - 1):
        raise ShapeError(
            f"causal_conv1d: inputs {x.shape}, state {state.shape} and kernel {kernel.shape}; they must be "
            "(sequences, tokens, channels), (sequences, channels, taps - 1) and (taps, channels)"
        )
    inputs = state.cast(ctx, x.dtype).permute(ctx, 0, 2, 1).concat(ctx, x, 1) if taps > 1 else x
    last = taps - 1
    result = inputs.slice(ctx, 1, last, last + tokens).mul(ctx, kernel.slice(ctx, 0, last, taps))
    for i in range(last):
        result = result.add(ctx, inputs.slice(ctx, 1, i, i + tokens).mul(ctx, kernel.slice(ctx, 0, i, i + 1)))
    return (result if bias is None else result.add(ctx, bias)), inputs
