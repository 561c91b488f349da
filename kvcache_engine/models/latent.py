"""Multi-head latent attention through a cache that stores latents (DeepSeek-AI, "DeepSeek-V2", 2024)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import ml
from kvcache_engine.models.attention import merge_heads
from kvcache_engine.models.indexer import Indexer
from kvcache_engine.models.step import ROPE, Step
from kvcache_engine.weights import Linear, Loader, Shape
from ml import nn

__all__ = ["LatentAttention", "LatentSizes", "latent_shapes", "load_latent_attention"]

EPS = 1e-6
"""The epsilon of the latents' norms, which is not in config.json."""


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """A token's latent has ``rank`` numbers, and its rotated part ``rope_dim``; ``nope_dim`` numbers of a
    head's queries and keys are not rotated. Queries are computed through ``query_rank`` numbers; None:
    directly.
    """

    heads: int
    rank: int
    rope_dim: int
    nope_dim: int
    v_dim: int
    query_rank: int | None
    bias: bool

    @property
    def stored(self) -> int:
        """The number of values stored for a token."""
        return self.rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        """The size of a head's query."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Attention in the absorbed form: stored latents are attended to directly.

    ``down``: hidden_size -> the input of queries, then latent and rotated part, in one product.
    ``query_norm`` and ``query_up`` compute queries from ``query_rank`` numbers, if set. ``up_key`` and
    ``up_value`` are those of ``ml.nn.latent_attention``. An ``indexer``, which needs ``query_rank``, selects
    the tokens that each query attends to.
    """

    down: Linear
    query_norm: ml.Tensor | None
    query_up: Linear | None
    latent_norm: ml.Tensor
    up_key: ml.Tensor
    up_value: ml.Tensor
    output: Linear
    sizes: LatentSizes
    scale: float
    indexer: Indexer | None = None

    def __call__(self, ctx: ml.Context, x: ml.Tensor, step: Step) -> ml.Tensor:
        """x (tokens, hidden_size) -> the same."""
        tokens, sizes, rotation = x.shape[0], self.sizes, step.rotations[ROPE]
        joined = self.down(ctx, x)
        end = joined.shape[1]
        query = compressed = joined.slice(ctx, 1, 0, end - sizes.stored)
        if self.query_up is not None:
            compressed = query.rms_norm(ctx, self.query_norm, EPS)
            query = self.query_up(ctx, compressed)
        query = query.reshape(ctx, tokens, sizes.heads, sizes.query_dim)
        latent = joined.slice(ctx, 1, end - sizes.stored, end - sizes.rope_dim)
        latent = latent.rms_norm(ctx, self.latent_norm, EPS).reshape(ctx, tokens, 1, sizes.rank)
        turned = joined.slice(ctx, 1, end - sizes.rope_dim, end).reshape(ctx, tokens, 1, sizes.rope_dim)
        key = latent.concat(ctx, rotation.apply(ctx, turned), 2)
        extra = None if self.indexer is None else self.indexer.keys(ctx, x, step)
        step.cache.put(ctx, key, v_dim=sizes.rank, extra=extra)
        select = None if self.indexer is None else self.indexer.select(ctx, x, compressed, step)

        def attend(absorbed: ml.Tensor) -> ml.Tensor:
            attended: ml.Tensor = step.cache.attend(ctx, absorbed, self.scale, select=select)
            return attended

        nope = query.slice(ctx, 2, 0, sizes.nope_dim)
        rope = rotation.apply(ctx, query.slice(ctx, 2, sizes.nope_dim, sizes.query_dim))
        attended = nn.latent_attention(ctx, nope, rope, self.up_key, self.up_value, attend)
        return self.output(ctx, merge_heads(ctx, attended))


def load_latent_attention(
    load: Loader,
    ctx: ml.Context,
    prefix: str,
    sizes: LatentSizes,
    scale: float,
    indexer: Indexer | None = None,
) -> LatentAttention:
    """Load it from the tensors under ``prefix``."""
    by_rank = sizes.query_rank is not None
    query = f"{prefix}.q_a_proj" if by_rank else f"{prefix}.q_proj"
    up = load.rows(f"{prefix}.kv_b_proj").reshape(sizes.heads, sizes.nope_dim + sizes.v_dim, sizes.rank)
    up_value = up[:, sizes.nope_dim :].swapaxes(1, 2)
    return LatentAttention(
        down=load.linear(ctx, query, f"{prefix}.kv_a_proj_with_mqa"),
        query_norm=load.norm(ctx, f"{prefix}.q_a_layernorm") if by_rank else None,
        query_up=load.linear(ctx, f"{prefix}.q_b_proj") if by_rank else None,
        latent_norm=load.norm(ctx, f"{prefix}.kv_a_layernorm"),
        up_key=load.put(ctx, np.ascontiguousarray(up[:, : sizes.nope_dim])),
        up_value=load.put(ctx, np.ascontiguousarray(up_value)),
        output=load.linear(ctx, f"{prefix}.o_proj"),
        sizes=sizes,
        scale=scale,
        indexer=indexer,
    )


def latent_shapes(prefix: str, hidden: int, sizes: LatentSizes) -> dict[str, Shape]:
    """The tensors that ``load_latent_attention`` reads."""
    queries = sizes.heads * sizes.query_dim
    shapes: dict[str, Shape] = {
        f"{prefix}.kv_a_proj_with_mqa.weight": (sizes.stored, hidden),
        f"{prefix}.kv_a_layernorm.weight": (sizes.rank,),
        f"{prefix}.kv_b_proj.weight": (sizes.heads * (sizes.nope_dim + sizes.v_dim), sizes.rank),
        f"{prefix}.o_proj.weight": (hidden, sizes.heads * sizes.v_dim),
    }
    if sizes.query_rank is None:
        shapes[f"{prefix}.q_proj.weight"] = (queries, hidden)
    else:
        shapes[f"{prefix}.q_a_proj.weight"] = (sizes.query_rank, hidden)
        shapes[f"{prefix}.q_a_layernorm.weight"] = (sizes.query_rank,)
        shapes[f"{prefix}.q_b_proj.weight"] = (queries, sizes.query_rank)
    if sizes.bias:
        shapes[f"{prefix}.kv_a_proj_with_mqa.bias"] = (sizes.stored,)
        shapes[f"{prefix}.o_proj.bias"] = (hidden,)
        if sizes.query_rank is not None:
            shapes[f"{prefix}.q_a_proj.bias"] = (sizes.query_rank,)
    return shapes
