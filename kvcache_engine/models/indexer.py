"""The indexer of DeepSeek sparse attention (DeepSeek-AI, "DeepSeek-V3.2", 2025; transformers'
modeling_deepseek_v32.py) selects the tokens that a query attends to by a cheap score::

    score of a token = sum over the indexer's heads of  weight * relu(query . key)

Keys have one head and are stored with the latents; weights depend on the query's token. Queries and keys are
rotated in their first dimensions, which pair halves. Scores are computed in F32, since rounding would select
other tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import ml
from kvcache import ExtraSpec
from kvcache.cache import ExtraShiftFunction
from kvcache_engine.models.step import Step
from kvcache_engine.weights import Linear, Loader, Shape
from ml import nn

__all__ = ["INDEX_ROPE", "IndexSizes", "Indexer", "index_shapes", "index_shift", "load_indexer"]

INDEX_ROPE = "index rope"
"""The name of the step's rotation for indexers."""
BLOCK = 1 << 26
"""About how many bytes of scores are computed at a time; prompts are split into blocks of queries."""
EPS = 1e-6
"""The epsilon of the keys' norm, which is not in config.json."""
_KEYS, _SEEN = "index", "index sees"


@dataclass(frozen=True, slots=True)
class IndexSizes:
    """``heads`` queries of ``dim`` numbers; a token attends to at most ``top_k`` tokens."""

    heads: int
    dim: int
    top_k: int

    @property
    def stored(self) -> ExtraSpec:
        """What a cache stores for a token."""
        return ExtraSpec(_KEYS, (self.dim,), ml.DType.F32)


@dataclass(frozen=True, slots=True)
class Indexer:
    """``query``: query_rank -> heads * dim; ``key``: hidden_size -> dim, followed by a layer norm. ``weight``
    (hidden_size -> heads) is F32.
    """

    query: Linear
    key: Linear
    norm: tuple[ml.Tensor, ml.Tensor]
    weight: Linear
    sizes: IndexSizes

    def keys(self, ctx: ml.Context, x: ml.Tensor, step: Step) -> Mapping[str, ml.Tensor]:
        """The extras to put for x (tokens, hidden_size): F32 (tokens, dim), by name."""
        tokens, dim = x.shape[0], self.sizes.dim
        key = nn.layer_norm(ctx, self.key(ctx, x), *self.norm, EPS)
        turned = step.rotations[INDEX_ROPE].apply(ctx, key.reshape(ctx, tokens, 1, dim))
        return {_KEYS: _wide(ctx, turned).reshape(ctx, tokens, dim)}

    def select(self, ctx: ml.Context, x: ml.Tensor, compressed: ml.Tensor, step: Step) -> ml.Tensor | None:
        """The selected rows of the cache's ``get``, I32 (tokens, count), after keys are put; None: all
        visible ones. ``compressed`` (tokens, query_rank) is the input of the queries.
        """
        keys = step.cache.get_extra(ctx, _KEYS)
        if keys.shape[0] <= self.sizes.top_k:
            return None
        tokens, history, count = x.shape[0], keys.shape[0], self.sizes.top_k
        heads, dim = self.sizes.heads, self.sizes.dim
        query = self.query(ctx, compressed).reshape(ctx, tokens, heads, dim)
        query = _wide(ctx, step.rotations[INDEX_ROPE].apply(ctx, query)).contiguous(ctx)
        weight = (
            self.weight(ctx, _wide(ctx, x)).scale(ctx, (heads * dim) ** -0.5).reshape(ctx, tokens, 1, heads)
        )
        keys, seen = keys.permute(ctx, 1, 0), self._seen(ctx, step, tokens, history)
        none = ctx.full((1,), -math.inf, ml.DType.F32)
        chosen = ctx.empty((tokens, count), ml.DType.I32)
        size = max(1, BLOCK // (4 * heads * history))
        for start in range(0, tokens, size):
            stop = min(start + size, tokens)
            part, share = (one.slice(ctx, 0, start, stop) for one in (query, weight))
            dots = part.reshape(ctx, (stop - start) * heads, dim).matmul(ctx, keys).relu(ctx)
            scores = share.matmul(ctx, dots.reshape(ctx, stop - start, heads, history))
            shown = seen.slice(ctx, 0, start, stop) if seen.shape[0] > 1 else seen
            scores = shown.where(ctx, scores.reshape(ctx, stop - start, history), none)
            scores.top_k(ctx, count)[1].copy(ctx, chosen.slice(ctx, 0, start, stop))
        return chosen

    def _seen(self, ctx: ml.Context, step: Step, tokens: int, history: int) -> ml.Tensor:
        """What each query sees, BOOL (tokens, history), or one row for all; computed once for all layers."""
        if _SEEN not in step.tensors:
            mask, zero = step.cache.get(ctx)[2], ctx.zeros((1,), ml.DType.I32)
            if mask is None or (mask is ml.CAUSAL and tokens == 1):
                seen = zero.compare(ctx, "==", zero).reshape(ctx, 1, 1)
            elif mask is ml.CAUSAL:
                last = ctx.arange(history - tokens, history, 1, ml.DType.I32).reshape(ctx, tokens, 1)
                seen = ctx.arange(0, history, 1, ml.DType.I32).compare(ctx, "<=", last)
            else:
                shown = mask.slice(ctx, 0, 0, tokens)
                seen = shown.compare(ctx, "==", ctx.zeros((1,), shown.dtype))
            step.tensors[_SEEN] = seen
        return step.tensors[_SEEN]


def index_shift(spec: nn.RopeSpec) -> ExtraShiftFunction:
    """The cache's shift function for stored keys, which are rotated by ``spec`` in their first dimensions."""
    turn = nn.rope_shift(spec)

    def shift(ctx: ml.Context, layer: int, name: str, extra: ml.Tensor, offsets: ml.Tensor) -> ml.Tensor:
        cells, dim = extra.shape
        return turn(ctx, layer, extra.reshape(ctx, cells, 1, dim), offsets).reshape(ctx, cells, dim)

    return shift


def load_indexer(load: Loader, ctx: ml.Context, prefix: str, sizes: IndexSizes) -> Indexer:
    """Load it from the tensors under ``prefix``."""
    weight = load.put(ctx, load.take(f"{prefix}.weights_proj.weight"), ml.DType.F32)
    return Indexer(
        query=load.linear(ctx, f"{prefix}.wq_b"),
        key=load.linear(ctx, f"{prefix}.wk"),
        norm=(load.norm(ctx, f"{prefix}.k_norm"), load.tensor(ctx, f"{prefix}.k_norm.bias")),
        weight=Linear(weight.permute(ctx, 1, 0)),
        sizes=sizes,
    )


def index_shapes(prefix: str, hidden: int, query_rank: int, sizes: IndexSizes) -> dict[str, Shape]:
    """The tensors that ``load_indexer`` reads."""
    return {
        f"{prefix}.wq_b.weight": (sizes.heads * sizes.dim, query_rank),
        f"{prefix}.wk.weight": (sizes.dim, hidden),
        f"{prefix}.k_norm.weight": (sizes.dim,),
        f"{prefix}.k_norm.bias": (sizes.dim,),
        f"{prefix}.weights_proj.weight": (sizes.heads, hidden),
    }


def _wide(ctx: ml.Context, x: ml.Tensor) -> ml.Tensor:
    return x if x.dtype is ml.DType.F32 else x.cast(ctx, ml.DType.F32)
