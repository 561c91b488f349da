"""Recurrences that are computed in chunks of tokens: how tokens are cut, and states left at places inside."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

import ml
from ml import DType

__all__ = ["CHUNK", "chunk", "chunk_masks", "chunk_size", "chunks", "joined", "scan"]

CHUNK = 64
"""Tokens per chunk at most; a power of two."""


def chunk_size(length: int) -> int:
    """The power of two that a run of ``length`` tokens is cut by."""
    return min(CHUNK, 1 << max(0, length - 1).bit_length())


def chunk_masks(ctx: ml.Context, size: int) -> ml.Tensor:
    """F32 (2 + log2(size), size, size) of 0 and 1 for chunks of ``size``, a power of two.

    First the lower triangle, then the same without its diagonal, then what ``_inverse`` joins at each
    step; for a size of 4::

        1 . . .    . . . .    . . . .    . . . .
        1 1 . .    1 . . .    1 . . .    . . . .
        1 1 1 .    1 1 . .    . . . .    1 1 . .
        1 1 1 1    1 1 1 .    . . 1 .    1 1 . .
    """
    index = np.arange(size)
    row, column = index[:, None], index[None, :]
    masks = [column <= row, column < row]
    for level in range(size.bit_length() - 1):
        half = row >> level
        masks.append((half % 2 == 1) & (column >> level == half - 1))
    return ctx.from_numpy(np.stack(masks).astype(np.float32), DType.F32)


def scan(
    ctx: ml.Context,
    rule: Callable[..., tuple[ml.Tensor, ml.Tensor]],
    tokens: Sequence[ml.Tensor],
    state: ml.Tensor,
    masks: ml.Tensor,
    cuts: Sequence[int] = (),
) -> tuple[ml.Tensor, list[ml.Tensor]]:
    """``rule(ctx, *tokens, state, masks)``, cut after each of ``cuts`` tokens, ascending.

    ``tokens`` (sequences, heads, tokens, ...) are queries, keys, values and what else the rule takes. Gives
    the outputs, of the values' shape, and the states at the cuts and at the end. A piece of one token is
    computed as in decoding.
    """
    if not cuts:
        out, state = rule(ctx, *tokens, state, masks)
        return out, [state]
    value = tokens[2]
    result, states = ctx.empty(value.shape, DType.F32), []
    for start, stop in itertools.pairwise((0, *cuts, value.shape[2])):
        piece = (x.slice(ctx, 2, start, stop) for x in tokens)
        out, state = rule(ctx, *piece, state, _sized(ctx, masks, chunk_size(stop - start)))
        out.copy(ctx, result.slice(ctx, 2, start, stop))
        states.append(state)
    return result, states


def _sized(ctx: ml.Context, masks: ml.Tensor, size: int) -> ml.Tensor:
    """The masks of chunks of ``size`` or less, out of those of larger ones."""
    if masks.shape[1] <= size:
        return masks
    levels = masks.slice(ctx, 0, 0, 1 + size.bit_length())
    return levels.slice(ctx, 1, 0, size).slice(ctx, 2, 0, size).contiguous(ctx)


def chunks(ctx: ml.Context, x: ml.Tensor, size: int) -> ml.Tensor:
    """(sequences, heads, tokens, dim) -> (sequences, heads, chunks, size, dim), filled up with zeros."""
    sequences, heads, tokens, dim = x.shape
    missing = -tokens % size
    if missing:
        x = x.concat(ctx, ctx.zeros((sequences, heads, missing, dim), DType.F32), 2)
    else:
        x = x.contiguous(ctx)
    return x.reshape(ctx, sequences, heads, (tokens + missing) // size, size, dim)


def chunk(ctx: ml.Context, x: ml.Tensor, i: int) -> ml.Tensor:
    """(sequences, heads, chunks, a, b) -> (sequences, heads, a, b) of chunk ``i``."""
    sequences, heads, _, a, b = x.shape
    return x.slice(ctx, 2, i, i + 1).reshape(ctx, sequences, heads, a, b)


def joined(ctx: ml.Context, outputs: Sequence[ml.Tensor], tokens: int) -> ml.Tensor:
    """The outputs of chunks, (sequences, heads, size, dim) each, as (sequences, heads, tokens, dim)."""
    result, (sequences, heads, size, dim) = outputs[0], outputs[0].shape
    if len(outputs) > 1:
        result = ctx.empty((sequences, heads, len(outputs) * size, dim), DType.F32)
        for i, part in enumerate(outputs):
            part.copy(ctx, result.slice(ctx, 2, i * size, (i + 1) * size))
    return result.slice(ctx, 2, 0, tokens)
