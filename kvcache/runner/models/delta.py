"""The gated delta rule (Yang et al., "Gated Delta Networks", 2024, arXiv 2412.06464).

Each head holds a matrix S (key_dim, value_dim), a memory of values by keys. A token lets it fade, takes
out what is stored under its key, writes the difference, and reads with its query::

    S <- exp(g) S;    S <- S + k^T (beta (v - k S));    o = q S

One token is computed so. Several go in chunks, in which all tokens are products of matrices (the WY
representation) and only the chunks follow one another, as ``torch_chunk_gated_delta_rule`` of
transformers does. Everything here is F32.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

import ml
from kvcache.runner.models.chunks import chunk, chunks, joined
from ml import DType

__all__ = ["gated_delta_rule"]


class _Tokens(NamedTuple):
    """A run of tokens, as :func:`gated_delta_rule` takes them."""

    query: ml.Tensor
    key: ml.Tensor
    value: ml.Tensor
    decay: ml.Tensor
    beta: ml.Tensor


def gated_delta_rule(
    ctx: ml.Context,
    query: ml.Tensor,
    key: ml.Tensor,
    value: ml.Tensor,
    decay: ml.Tensor,
    beta: ml.Tensor,
    state: ml.Tensor,
    masks: ml.Tensor,
) -> tuple[ml.Tensor, ml.Tensor]:
    """The outputs (sequences, heads, tokens, value_dim), and the states after the last token.

    query and key (sequences, heads, tokens, key_dim), value (..., value_dim), decay g and beta
    (sequences, heads, tokens), state (sequences, heads, key_dim, value_dim): all F32.
    """
    tokens = _Tokens(query, key, value, decay, beta)
    return _one(ctx, tokens, state) if key.shape[2] == 1 else _chunked(ctx, tokens, state, masks)


def _one(ctx: ml.Context, token: _Tokens, state: ml.Tensor) -> tuple[ml.Tensor, ml.Tensor]:
    query, key, value, decay, beta = token
    sequences, heads = decay.shape[:2]
    state = state.mul(ctx, decay.exp(ctx).reshape(ctx, sequences, heads, 1, 1))
    delta = value.sub(ctx, key.matmul(ctx, state)).mul(ctx, beta.reshape(ctx, sequences, heads, 1, 1))
    state = state.add(ctx, key.permute(ctx, 0, 1, 3, 2).mul(ctx, delta))
    return query.matmul(ctx, state), state


def _chunked(
    ctx: ml.Context, run: _Tokens, state: ml.Tensor, masks: ml.Tensor
) -> tuple[ml.Tensor, ml.Tensor]:
    """With G the running sum of g in a chunk and L_ij = beta_i (k_i . k_j) exp(G_i - G_j) for j < i::

        T = (1 + L)^-1     U = T beta V     W = T beta exp(G) K      for all chunks at once
        N = U - W S        O = exp(G) Q S + (Q K^T exp(G_i - G_j)) N        chunk by chunk
        S <- exp(G_last) S + (exp(G_last - G) K)^T N

    Tokens that fill up the last chunk have k = v = g = beta = 0 and leave the state alone.
    """
    query, key, value, decay, beta = run
    sequences, heads, tokens, _ = key.shape
    size = masks.shape[1]
    causal, strict = (masks.slice(ctx, 0, i, i + 1).reshape(ctx, size, size) for i in range(2))
    query, key, value = (chunks(ctx, x, size) for x in (query, key, value))
    decay, beta = (chunks(ctx, x.reshape(ctx, sequences, heads, tokens, 1), size) for x in (decay, beta))
    total = causal.matmul(ctx, decay).exp(ctx)  # exp(G) (sequences, heads, chunks, size, 1)
    apart = causal.matmul(ctx, strict.mul(ctx, decay))  # G_i - G_j, no large sums taken off one another
    fade = apart.exp(ctx).mul(ctx, causal)
    left = fade.slice(ctx, 3, size - 1, size).permute(ctx, 0, 1, 2, 4, 3)  # exp(G_last - G)
    key_t = key.permute(ctx, 0, 1, 2, 4, 3)
    seen = query.matmul(ctx, key_t).mul(ctx, fade)
    weighted = key.mul(ctx, beta)
    inverse = _inverse(ctx, weighted.matmul(ctx, key_t).mul(ctx, fade).mul(ctx, strict), masks)
    new = inverse.matmul(ctx, value.mul(ctx, beta))
    known = inverse.matmul(ctx, weighted.mul(ctx, total))
    faded = query.mul(ctx, total)
    stored = key.mul(ctx, left).permute(ctx, 0, 1, 2, 4, 3)
    outputs, remaining = [], total.slice(ctx, 3, size - 1, size)
    for i in range(key.shape[2]):
        at = (chunk(ctx, x, i) for x in (new, known, faded, seen, stored, remaining))
        new_i, known_i, faded_i, seen_i, stored_i, remaining_i = at
        written = new_i.sub(ctx, known_i.matmul(ctx, state))
        outputs.append(faded_i.matmul(ctx, state).add(ctx, seen_i.matmul(ctx, written)))
        state = state.mul(ctx, remaining_i).add(ctx, stored_i.matmul(ctx, written))
    return joined(ctx, outputs, tokens), state


def _inverse(ctx: ml.Context, lower: ml.Tensor, masks: ml.Tensor) -> ml.Tensor:
    """(1 + lower)^-1 of strictly lower triangles (..., size, size), as stable as substitution.

    Inverses of the blocks on the diagonal, joined by pairs: of (A 0; B C) it is (a 0; -c B a, c), with
    a and c the inverses of A and C. ``masks`` pick the B of each step.
    """
    size = lower.shape[-1]
    inverse = ctx.from_numpy(np.eye(size, dtype=np.float32), DType.F32)
    for level in range(2, masks.shape[0]):
        mask = masks.slice(ctx, 0, level, level + 1).reshape(ctx, size, size)
        inverse = inverse.sub(ctx, inverse.matmul(ctx, lower.mul(ctx, mask)).matmul(ctx, inverse))
    return inverse
