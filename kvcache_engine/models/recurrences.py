"""A recurrence over the tokens of a sequence, in chunks: the gated delta rule.

Each head has a matrix S (key_dim, value_dim), an associative memory. A token decays it, removes the value
stored under its key, writes and reads::

    S <- exp(g) S;    S <- S + k^T (beta (v - k S));    o = q S

(Yang et al., "Gated Delta Networks", 2024, arXiv 2412.06464.) A single token is computed this way. Several
are computed in chunks, as in transformers: matrix products within a chunk, and one chunk after another.
Everything is F32.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

import ml
from ml import DType

__all__ = ["CHUNK", "chunk_masks", "chunk_size", "gated_delta_rule", "scan"]

CHUNK = 64
"""The most tokens per chunk; a power of two."""


def chunk_size(length: int) -> int:
    """The chunk size, a power of two, for a run of ``length`` tokens."""
    return min(CHUNK, 1 << max(0, length - 1).bit_length())


def chunk_masks(ctx: ml.Context, size: int) -> ml.Tensor:
    """F32 (2 + log2(size), size, size) of 0 and 1 for chunks of ``size``, a power of two.

    The lower triangle, the same without its diagonal, then the blocks that ``_inverse`` joins at each step;
    for a size of 4::

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
    tokens: Sequence[ml.Tensor],
    state: ml.Tensor,
    masks: ml.Tensor,
    cuts: Sequence[int] = (),
) -> tuple[ml.Tensor, list[ml.Tensor]]:
    """``gated_delta_rule(ctx, tokens, state, masks)``, split after each of ``cuts`` tokens, ascending.
    Returns the outputs, of the values' shape, and the states at the cuts and at the end. A piece of one token
    is computed as in decoding.
    """
    if not cuts:
        out, state = gated_delta_rule(ctx, tokens, state, masks)
        return out, [state]
    value = tokens[2]
    result, states = ctx.empty(value.shape, DType.F32), []
    for start, stop in itertools.pairwise((0, *cuts, value.shape[2])):
        piece = [x.slice(ctx, 2, start, stop) for x in tokens]
        out, state = gated_delta_rule(ctx, piece, state, _sized(ctx, masks, chunk_size(stop - start)))
        out.copy(ctx, result.slice(ctx, 2, start, stop))
        states.append(state)
    return result, states


def _sized(ctx: ml.Context, masks: ml.Tensor, size: int) -> ml.Tensor:
    """The masks of chunks of at most ``size``, sliced from those of larger ones."""
    if masks.shape[1] <= size:
        return masks
    levels = masks.slice(ctx, 0, 0, 1 + size.bit_length())
    return levels.slice(ctx, 1, 0, size).slice(ctx, 2, 0, size).contiguous(ctx)


def _cut(ctx: ml.Context, x: ml.Tensor, size: int) -> ml.Tensor:
    """(sequences, heads, tokens, dim) -> (sequences, heads, chunks, size, dim), padded with zeros."""
    sequences, heads, tokens, dim = x.shape
    missing = -tokens % size
    if missing:
        x = x.concat(ctx, ctx.zeros((sequences, heads, missing, dim), DType.F32), 2)
    else:
        x = x.contiguous(ctx)
    return x.reshape(ctx, sequences, heads, (tokens + missing) // size, size, dim)


def _chunk(ctx: ml.Context, x: ml.Tensor, i: int) -> ml.Tensor:
    """Chunk ``i``: (sequences, heads, chunks, a, b) -> (sequences, heads, a, b)."""
    sequences, heads, _, a, b = x.shape
    return x.slice(ctx, 2, i, i + 1).reshape(ctx, sequences, heads, a, b)


def _joined(ctx: ml.Context, outputs: Sequence[ml.Tensor], tokens: int) -> ml.Tensor:
    """The outputs of chunks, (sequences, heads, size, dim) each, as (sequences, heads, tokens, dim)."""
    result, (sequences, heads, size, dim) = outputs[0], outputs[0].shape
    if len(outputs) > 1:
        result = ctx.empty((sequences, heads, len(outputs) * size, dim), DType.F32)
        for i, part in enumerate(outputs):
            part.copy(ctx, result.slice(ctx, 2, i * size, (i + 1) * size))
    return result.slice(ctx, 2, 0, tokens)


class _Chunks(NamedTuple):
    """A run of tokens in chunks (sequences, heads, chunks, size, ...); G is the running sum of g in a chunk.

    ``strict`` is the lower triangle without its diagonal, ``key_t`` K^T, ``fade`` exp(G_i - G_j) for j <= i,
    ``seen`` Q K^T times that, ``total`` exp(G), ``faded`` exp(G) Q, ``stored`` (exp(G_last - G) K)^T and
    ``remaining`` exp(G_last). The tokens that pad the last chunk are zeros and do not change the state.
    """

    key: ml.Tensor
    value: ml.Tensor
    strict: ml.Tensor
    key_t: ml.Tensor
    fade: ml.Tensor
    seen: ml.Tensor
    total: ml.Tensor
    faded: ml.Tensor
    stored: ml.Tensor
    remaining: ml.Tensor


def _in_chunks(
    ctx: ml.Context,
    query: ml.Tensor,
    key: ml.Tensor,
    value: ml.Tensor,
    decay: ml.Tensor,
    masks: ml.Tensor,
) -> _Chunks:
    size = masks.shape[1]
    causal, strict = (masks.slice(ctx, 0, i, i + 1).reshape(ctx, size, size) for i in range(2))
    query, key, value = (_cut(ctx, x, size) for x in (query, key, value))
    decay = _cut(ctx, decay.reshape(ctx, *decay.shape, 1), size)
    total = causal.matmul(ctx, decay).exp(ctx)
    apart = causal.matmul(ctx, strict.mul(ctx, decay))  # G_i - G_j, without subtracting large sums
    fade = apart.exp(ctx).mul(ctx, causal)
    left = fade.slice(ctx, 3, size - 1, size).permute(ctx, 0, 1, 2, 4, 3)  # exp(G_last - G)
    key_t = key.permute(ctx, 0, 1, 2, 4, 3)
    return _Chunks(
        key,
        value,
        strict,
        key_t,
        fade,
        seen=query.matmul(ctx, key_t).mul(ctx, fade),
        total=total,
        faded=query.mul(ctx, total),
        stored=key.mul(ctx, left).permute(ctx, 0, 1, 2, 4, 3),
        remaining=total.slice(ctx, 3, size - 1, size),
    )


def _faded(ctx: ml.Context, state: ml.Tensor, decay: ml.Tensor) -> ml.Tensor:
    """exp(g) S for one token."""
    return state.mul(ctx, decay.exp(ctx).reshape(ctx, *decay.shape[:2], 1, 1))


def gated_delta_rule(
    ctx: ml.Context, tokens: Sequence[ml.Tensor], state: ml.Tensor, masks: ml.Tensor
) -> tuple[ml.Tensor, ml.Tensor]:
    """The outputs (sequences, heads, tokens, value_dim), and the states after the last token.

    ``tokens``: query and key (sequences, heads, tokens, key_dim), value (..., value_dim), decay g and beta
    (sequences, heads, tokens). State (sequences, heads, key_dim, value_dim), ``masks`` of ``chunk_masks``:
    all are F32.

    In chunks by the WY representation, with L_ij = beta_i (k_i . k_j) exp(G_i - G_j) for j < i::

        T = (1 + L)^-1     U = T beta V     W = T beta exp(G) K      for all chunks at once
        N = U - W S        O = exp(G) Q S + (Q K^T exp(G_i - G_j)) N        chunk by chunk
        S <- exp(G_last) S + (exp(G_last - G) K)^T N
    """
    query, key, value, decay, beta = tokens
    if key.shape[2] == 1:
        state = _faded(ctx, state, decay)
        share = beta.reshape(ctx, *beta.shape[:2], 1, 1)
        delta = value.sub(ctx, key.matmul(ctx, state)).mul(ctx, share)
        state = state.add(ctx, key.permute(ctx, 0, 1, 3, 2).mul(ctx, delta))
        return query.matmul(ctx, state), state
    run = _in_chunks(ctx, query, key, value, decay, masks)
    share = _cut(ctx, beta.reshape(ctx, *beta.shape, 1), masks.shape[1])
    weighted = run.key.mul(ctx, share)
    lower = weighted.matmul(ctx, run.key_t).mul(ctx, run.fade).mul(ctx, run.strict)
    inverse = _inverse(ctx, lower, masks)
    new = inverse.matmul(ctx, run.value.mul(ctx, share))
    known = inverse.matmul(ctx, weighted.mul(ctx, run.total))
    outputs = []
    for i in range(new.shape[2]):
        at = (_chunk(ctx, x, i) for x in (new, known, run.faded, run.seen, run.stored, run.remaining))
        new_i, known_i, faded_i, seen_i, stored_i, remaining_i = at
        written = new_i.sub(ctx, known_i.matmul(ctx, state))
        outputs.append(faded_i.matmul(ctx, state).add(ctx, seen_i.matmul(ctx, written)))
        state = state.mul(ctx, remaining_i).add(ctx, stored_i.matmul(ctx, written))
    return _joined(ctx, outputs, key.shape[2]), state


def _inverse(ctx: ml.Context, lower: ml.Tensor, masks: ml.Tensor) -> ml.Tensor:
    """(1 + lower)^-1 of strictly lower triangles (..., size, size), as stable as substitution.

    Inverses of the blocks on the diagonal are joined in pairs: that of (A 0; B C) is (a 0; -c B a, c), with a
    and c the inverses of A and C. ``masks`` select the B of each step.
    """
    size = lower.shape[-1]
    inverse = ctx.from_numpy(np.eye(size, dtype=np.float32), DType.F32)
    for level in range(2, masks.shape[0]):
        mask = masks.slice(ctx, 0, level, level + 1).reshape(ctx, size, size)
        inverse = inverse.sub(ctx, inverse.matmul(ctx, lower.mul(ctx, mask)).matmul(ctx, inverse))
    return inverse
