"""Gemma 3, text only, written once on ml.nn: alternating sliding and full layers.

Gemma Team, "Gemma 3 Technical Report", 2025 (arXiv 2503.19786); transformers' modeling_gemma3.py::

    hidden += norm(attend(norm(hidden)))     queries and keys normalised per head, then rotated
    hidden += norm(mlp(norm(hidden)))        gelu(gate) * up

Norms are stored around zero: their weight is 1 + w. Sliding layers have their own, unscaled rotary base.
Embeddings are multiplied by sqrt(hidden_size), rounded to the weights' dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import ml
from kvcache import WrapperCache
from kvcache.cache import Batch, Cache
from kvcache_engine.config import common_fields, refuse
from kvcache_engine.errors import ModelError
from kvcache_engine.models.attention import Attention, load_attention
from kvcache_engine.models.decoder import CausalModel
from kvcache_engine.models.feedforward import GatedMLP, geglu, load_mlp
from kvcache_engine.models.layer_types import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    SlidingConfig,
    sliding_cache,
    sliding_fields,
)
from kvcache_engine.models.step import Step
from kvcache_engine.weights import Loader
from ml import nn
from ml.nn import parse_rope

__all__ = [
    "AFTER",
    "BEFORE",
    "Gemma3",
    "Gemma3Config",
    "begin_gemma",
    "capped",
    "embedding_scale",
    "gemma_fields",
    "parse",
]


@dataclass(frozen=True, slots=True)
class Gemma3Config(SlidingConfig):
    """``query_scalar``: scores are divided by its square root."""

    logit_softcap: float | None
    query_scalar: float


def parse(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> Gemma3Config:
    refuse(
        raw,
        {
            "hidden_activation": ["gelu_pytorch_tanh"],
            "attn_logit_softcapping": [None],
            "use_bidirectional_attention": [False, None],
        },
    )
    scalar = float(raw["query_pre_attn_scalar"])
    if not scalar > 0:
        raise ModelError(f"query_pre_attn_scalar={scalar}; it must be above 0")
    pattern = raw.get("sliding_window_pattern", 6)
    fields = gemma_fields(raw, generation, "Gemma3ForCausalLM", pattern)
    return Gemma3Config(**fields, query_scalar=scalar)


def gemma_fields(
    raw: Mapping[str, Any], generation: Mapping[str, Any], architecture: str, pattern: int
) -> dict[str, Any]:
    """The fields of a SlidingConfig in which every ``pattern``-th layer is full, with both rotations and the
    cap.
    """
    raw = {**raw, "original_max_position_embeddings": None}  # each layer type has its own, or none
    fields = common_fields(raw, generation, architecture)
    types = SLIDING_ATTENTION, FULL_ATTENTION
    own = (raw.get("rope_parameters") or {}).get(SLIDING_ATTENTION) or {}
    local = {"rope_theta": raw["rope_local_base_freq"], "rope_parameters": own, "rope_scaling": None}
    cap, head_dim = raw["final_logit_softcapping"], fields["head_dim"]
    if cap is not None and not cap > 0:
        raise ModelError(f"final_logit_softcapping={cap}; it must be above 0, or null for none")
    return {
        **sliding_fields(raw, fields, lambda i: types[(i + 1) % pattern == 0]),
        "rope": parse_rope(raw, head_dim),
        "local_rope": parse_rope({**raw, **local}, head_dim),
        "qk_norm": True,
        "logit_softcap": None if cap is None else float(cap),
    }


BEFORE = ("input_layernorm", "pre_feedforward_layernorm")
AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")


def begin_gemma(ctx: ml.Context, batch: Batch, cache: Cache, config: SlidingConfig) -> Step:
    """Begin a pass with the rotations of both layer types."""
    ropes = {SLIDING_ATTENTION: config.local_rope, FULL_ATTENTION: config.rope}
    rotations = {kind: nn.Rotation(ctx, batch.positions, rope) for kind, rope in ropes.items()}
    return Step(batch, cache, rotations)


def embedding_scale(size: int, dtype: ml.DType) -> float:
    """sqrt(size), rounded to the weights' dtype."""
    return float(np.asarray(math.sqrt(size), dtype.numpy))


def capped(ctx: ml.Context, logits: ml.Tensor, cap: float | None) -> ml.Tensor:
    """``cap * tanh(logits / cap)``; unchanged if ``cap`` is None."""
    return logits if cap is None else logits.scale(ctx, 1 / cap).tanh(ctx).scale(ctx, cap)


class Gemma3(CausalModel[Gemma3Config]):
    cache_type = WrapperCache
    cache_of = staticmethod(sliding_cache)
    norm_offset, norm_names, after_names = 1.0, BEFORE, AFTER

    def embed(self, ctx: ml.Context, batch: Batch) -> ml.Tensor:
        return super().embed(ctx, batch).scale(ctx, embedding_scale(self.config.hidden_size, self.dtype))

    def begin_pass(self, ctx: ml.Context, batch: Batch, cache: Cache) -> Step:
        return begin_gemma(ctx, batch, cache, self.config)

    def logits(self, ctx: ml.Context, hidden: ml.Tensor) -> ml.Tensor:
        return capped(ctx, super().logits(ctx, hidden), self.config.logit_softcap)

    def mixer(self, load: Loader, ctx: ml.Context, prefix: str, i: int) -> Attention:
        config, scale = self.config, self.config.query_scalar**-0.5
        attention = f"{prefix}.self_attn"
        return load_attention(load, ctx, attention, config, 1.0, scale=scale, rotation=config.kinds[i])

    def mlp(self, load: Loader, ctx: ml.Context, prefix: str, i: int) -> GatedMLP:
        return load_mlp(load, ctx, f"{prefix}.mlp", geglu)
