"""Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, arXiv 2405.04434).

A token's keys and values of all heads are computed from one vector of ``rank`` numbers, its latent. Only the
latent is stored, with ``rope_dim`` rotated numbers that all heads share::

    key of head h      [ up_key[h] @ latent, rotated ]
    value of head h      latent @ up_value[h]

Scores are linear in the key and outputs in the values, so both products can be applied to the tokens of the
pass instead of the history, whose latents are attended to directly (the absorbed form)::

    query . key = (query_nope @ up_key[h]) . latent + query_rope . rotated
    answer      = (sum of weight * latent) @ up_value[h]
"""

from __future__ import annotations

from collections.abc import Callable

from ml.errors import DTypeError, ShapeError
from ml.protocols import Context, Tensor


def latent_attention(
    ctx: Context,
    query_nope: Tensor,
    query_rope: Tensor,
    up_key: Tensor,
    up_value: Tensor,
    attend: Callable[[Tensor], Tensor],
) -> Tensor:
    """Latent attention in the absorbed form; returns (tokens, heads, v_dim).

    query_nope (tokens, heads, nope_dim); query_rope (tokens, heads, rope_dim), already rotated; up_key
    (heads, nope_dim, rank); up_value (heads, rank, v_dim). ``attend`` receives the queries (tokens, heads,
    rank + rope_dim) and returns (tokens, heads, rank): attention over one KV head, whose keys are a token's
    latent and its rotated numbers, and whose values are the latent. It scales scores, by ``(nope_dim +
    rope_dim) ** -0.5`` in the paper, whatever ``rank`` is.

    Each pair of query and key costs ``2 * rank + rope_dim`` products, and no keys or values of heads are
    computed.

    Raises ShapeError or DTypeError for incompatible operands before ``attend`` is called, and ShapeError for
    a result of ``attend`` with the wrong shape.
    """
    _check(query_nope, query_rope, up_key, up_value)
    (tokens, heads, _), rank = query_nope.shape, up_key.shape[2]
    by_head = query_nope.permute(ctx, 1, 0, 2).matmul(ctx, up_key).permute(ctx, 1, 0, 2)
    attended = attend(by_head.concat(ctx, query_rope, 2))
    if attended.shape != (tokens, heads, rank):
        raise ShapeError(
            f"latent_attention: attend returned {attended.shape}; it must return {(tokens, heads, rank)}"
        )
    return attended.permute(ctx, 1, 0, 2).matmul(ctx, up_value).permute(ctx, 1, 0, 2)


def _check(query_nope: Tensor, query_rope: Tensor, up_key: Tensor, up_value: Tensor) -> None:
    operands = {"query_nope": query_nope, "query_rope": query_rope, "up_key": up_key, "up_value": up_value}
    shapes = [x.shape for x in operands.values()]
    nope, rope, key, value = shapes
    if (
        any(len(shape) != 3 for shape in shapes)
        or nope[:2] != rope[:2]
        or key[:2] != nope[1:]
        or value[:2] != (key[0], key[2])
    ):
        listed = ", ".join(f"{name} {x.shape}" for name, x in operands.items())
        raise ShapeError(
            f"latent_attention: {listed}; they are (tokens, heads, nope_dim), (tokens, heads, rope_dim), "
            "(heads, nope_dim, rank) and (heads, rank, v_dim)"
        )
    dtypes = {x.dtype for x in operands.values()}
    if len(dtypes) > 1 or not query_nope.dtype.is_float:
        listed = ", ".join(f"{name} {x.dtype.name}" for name, x in operands.items())
        raise DTypeError(
            f"latent_attention: {listed}; they must all have the same dtype, one of F32, F16 and BF16"
        )
