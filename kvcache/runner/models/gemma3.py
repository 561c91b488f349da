"""Gemma 3, text only, written once on ml.nn: sliding and full layers in turns.

Gemma Team, "Gemma 3 Technical Report", 2025 (arXiv 2503.19786); transformers' modeling_gemma3.py::

    hidden += norm(attend(norm(hidden)))     queries and keys normalised per head, then rotated
    hidden += norm(mlp(norm(hidden)))        gelu(gate) * up

Norms are stored around zero: their weight is 1 + w. Sliding layers turn with a rotary base of their
own, and unscaled. Embeddings are multiplied by sqrt(hidden_size), a number of the weights' dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import ml
from kvcache.cache import Batch, Cache
from kvcache.caches.wrapper import WrapperCache
from kvcache.runner.config import common_fields, refuse
from kvcache.runner.models.attention import attention_shapes, load_attention, qk_norm
from kvcache.runner.models.decoder import CausalModel, Layer, Step, model_shapes
from kvcache.runner.models.feedforward import geglu, load_mlp, mlp_shapes
from kvcache.runner.models.layer_types import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    SlidingConfig,
    parse_rope,
    sliding_cache,
    sliding_fields,
)
from kvcache.runner.models.prenorm import PreNormLayer, load_norms, norm_shapes
from kvcache.runner.weights import Loader, Shape
from ml import nn

__all__ = ["Gemma3", "Gemma3Config", "make_cache", "parse", "shapes"]

_DEFAULTS = {
    "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "sliding_window": 4096,
    "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gemma3Config(SlidingConfig):
    """``rope`` is that of the full layers."""

    local_rope: nn.RopeSpec
    query_scalar: float
    logit_softcap: float | None


def parse(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> Gemma3Config:
    refuse(
        raw,
        {
            "hidden_activation": ["gelu_pytorch_tanh"],
            "attn_logit_softcapping": [None],
            "use_bidirectional_attention": [False, None],
        },
    )
    raw = {**_DEFAULTS, **raw}
    fields = common_fields(raw, generation, "Gemma3ForCausalLM")
    pattern = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6
    types = SLIDING_ATTENTION, FULL_ATTENTION
    local = {"rope_theta": raw.get("rope_local_base_freq", 10_000.0)}
    local = (raw.get("rope_parameters") or {}).get(SLIDING_ATTENTION) or local
    cap = raw.get("final_logit_softcapping")
    head_dim = fields["head_dim"]
    return Gemma3Config(
        **sliding_fields(raw, fields, lambda i: types[(i + 1) % pattern == 0]),
        rope=parse_rope(raw, head_dim, 1_000_000.0, FULL_ATTENTION),
        local_rope=parse_rope({**raw, "rope_parameters": local}, head_dim, 10_000.0),
        query_scalar=float(raw.get("query_pre_attn_scalar", 256)),
        logit_softcap=None if cap is None else float(cap),
    )


def shapes(config: Gemma3Config) -> dict[str, Shape]:
    """The name and shape of every tensor."""
    layer = attention_shapes(config, qk_norm=True)
    layer |= norm_shapes(config.hidden_size, _BEFORE + _AFTER)
    layer |= mlp_shapes("mlp", config.hidden_size, config.intermediate_size)
    return model_shapes(config, lambda _: layer)


_BEFORE = ("input_layernorm", "pre_feedforward_layernorm")
_AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")


def make_cache(
    config: Gemma3Config, dtype: ml.DType | None = None, memory: int | None = None
) -> WrapperCache:
    """For the two types of layers; ``memory`` as SlidingWindowCache has it, any ``dtype`` alike."""
    return sliding_cache(config.window, config.local_rope, config.rope, memory)


class Gemma3(CausalModel[Gemma3Config]):
    """The weights of a model and its forward pass."""

    cache_type = WrapperCache
    cache_of = staticmethod(make_cache)
    norm_offset = 1.0
    shapes = staticmethod(shapes)

    def embed(self, ctx: ml.Context, batch: Batch) -> ml.Tensor:
        scale = float(np.asarray(math.sqrt(self.config.hidden_size), self.dtype.numpy))
        return super().embed(ctx, batch).scale(ctx, scale)

    def begin_pass(self, ctx: ml.Context, batch: Batch, cache: Cache) -> Step:
        ropes = {SLIDING_ATTENTION: self.config.local_rope, FULL_ATTENTION: self.config.rope}
        rotations = {kind: nn.Rotation(ctx, batch.positions, rope) for kind, rope in ropes.items()}
        return Step(batch, cache, rotations)

    def logits(self, ctx: ml.Context, hidden: ml.Tensor) -> ml.Tensor:
        logits, cap = super().logits(ctx, hidden), self.config.logit_softcap
        return logits if cap is None else logits.scale(ctx, 1 / cap).tanh(ctx).scale(ctx, cap)

    def _layer(self, load: Loader, ctx: ml.Context, i: int) -> Layer:
        config, prefix = self.config, f"model.layers.{i}"
        attention = f"{prefix}.self_attn"
        return PreNormLayer(
            eps=config.rms_norm_eps,
            norms=load_norms(load, ctx, prefix, 1.0, _BEFORE),
            mixer=load_attention(
                load,
                ctx,
                attention,
                config,
                scale=config.query_scalar**-0.5,
                qk_norm=qk_norm(load, ctx, attention, config, 1.0),
                rotation=config.kinds[i],
            ),
            mlp=load_mlp(load, ctx, f"{prefix}.mlp", geglu),
            cache_kind=config.cache_kind(i),
            after=load_norms(load, ctx, prefix, 1.0, _AFTER),
        )
