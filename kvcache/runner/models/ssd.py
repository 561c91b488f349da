"""The recurrence of Mamba-2 (Dao & Gu, "Transformers are SSMs", 2024, arXiv 2405.21060).

Each head holds a matrix S (state_dim, value_dim). A token lets it fade, writes to it and reads from it::

    S <- exp(g) S + k^T v;    o = q S

with k and q what the paper calls B and C, v = dt x and g = dt A. Several tokens go in chunks, in which all
are products of matrices (the paper's section 6). Everything here is F32.
"""

from __future__ import annotations

import ml
from kvcache.runner.models.chunks import chunk, chunks, joined

__all__ = ["state_space_rule"]


def state_space_rule(
    ctx: ml.Context,
    query: ml.Tensor,
    key: ml.Tensor,
    value: ml.Tensor,
    decay: ml.Tensor,
    state: ml.Tensor,
    masks: ml.Tensor,
) -> tuple[ml.Tensor, ml.Tensor]:
    """The outputs (sequences, heads, tokens, value_dim), and the states after the last token.

    query and key (sequences, heads, tokens, state_dim), value (..., value_dim), decay g (sequences,
    heads, tokens), state (sequences, heads, state_dim, value_dim), ``masks`` of ``chunk_masks``: all F32.
    """
    if key.shape[2] == 1:
        sequences, heads = decay.shape[:2]
        state = state.mul(ctx, decay.exp(ctx).reshape(ctx, sequences, heads, 1, 1))
        state = state.add(ctx, key.permute(ctx, 0, 1, 3, 2).mul(ctx, value))
        return query.matmul(ctx, state), state
    return _chunked(ctx, query, key, value, decay, state, masks)


def _chunked(
    ctx: ml.Context,
    query: ml.Tensor,
    key: ml.Tensor,
    value: ml.Tensor,
    decay: ml.Tensor,
    state: ml.Tensor,
    masks: ml.Tensor,
) -> tuple[ml.Tensor, ml.Tensor]:
    """With G the running sum of g in a chunk::

        O = exp(G) Q S + (Q K^T exp(G_i - G_j)) V for j <= i      S <- exp(G_last) S + (exp(G_last - G) K)^T V

    Tokens that fill up the last chunk have k = v = g = 0 and leave the state alone.
    """
    sequences, heads, tokens, _ = key.shape
    size = masks.shape[1]
    causal, strict = (masks.slice(ctx, 0, i, i + 1).reshape(ctx, size, size) for i in range(2))
    query, key, value = (chunks(ctx, x, size) for x in (query, key, value))
    decay = chunks(ctx, decay.reshape(ctx, sequences, heads, tokens, 1), size)
    total = causal.matmul(ctx, decay).exp(ctx)  # exp(G) (sequences, heads, chunks, size, 1)
    apart = causal.matmul(ctx, strict.mul(ctx, decay))  # G_i - G_j, no large sums taken off one another
    fade = apart.exp(ctx).mul(ctx, causal)
    left = fade.slice(ctx, 3, size - 1, size).permute(ctx, 0, 1, 2, 4, 3)  # exp(G_last - G)
    seen = query.matmul(ctx, key.permute(ctx, 0, 1, 2, 4, 3)).mul(ctx, fade)
    within, faded = seen.matmul(ctx, value), query.mul(ctx, total)
    written = key.mul(ctx, left).permute(ctx, 0, 1, 2, 4, 3).matmul(ctx, value)
    remaining = total.slice(ctx, 3, size - 1, size)
    outputs = []
    for i in range(key.shape[2]):
        within_i, faded_i, written_i, left_i = (chunk(ctx, x, i) for x in (within, faded, written, remaining))
        outputs.append(faded_i.matmul(ctx, state).add(ctx, within_i))
        state = state.mul(ctx, left_i).add(ctx, written_i)
    return joined(ctx, outputs, tokens), state
