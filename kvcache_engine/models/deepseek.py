"""DeepSeek-V2, V3 and V3.2 on ml.nn: latent attention, and experts selected within groups.

DeepSeek-AI, "DeepSeek-V2", 2024 (arXiv 2405.04434), and "DeepSeek-V3 Technical Report", 2024 (arXiv
2412.19437), "DeepSeek-V3.2", 2025; transformers' modeling_deepseek_v2.py, _v3.py and _v32.py::

    hidden += latent_attention(norm(hidden))     one KV head of rank + rope_dim numbers is stored
                                                 V3.2: to the tokens that an indexer selects
    hidden += mlp(norm(hidden))                  dense in the first layers, then experts and shared ones

The layer for multi-token prediction (num_nextn_predict_layers) is loaded by ``with_mtp`` (mtp.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml
from kvcache import CausalCache, LayerShape
from kvcache.cache import Batch, Cache
from kvcache_engine.config import common_fields, experts_per_token, refuse
from kvcache_engine.errors import ModelError
from kvcache_engine.models.feedforward import group_routing
from kvcache_engine.models.indexer import (
    INDEX_ROPE,
    IndexSizes,
    index_shapes,
    index_shift,
    load_indexer,
)
from kvcache_engine.models.latent import LatentAttention, LatentSizes, latent_shapes, load_latent_attention
from kvcache_engine.models.layer_types import layer_types
from kvcache_engine.models.moe import MoE, MoEConfig
from kvcache_engine.models.step import Step
from kvcache_engine.weights import Loader, Shape
from ml import nn
from ml.nn import parse_rope

__all__ = ["DeepSeek", "DeepSeekConfig", "make_cache", "parse_v2", "parse_v3", "parse_v32"]

_INDEXED = "indexed_attention"
_SIZES = "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "moe_intermediate_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSeekConfig(MoEConfig):
    """``kv_heads`` is 1, and ``head_dim`` is the size of what is stored for a token."""

    latent: LatentSizes
    index: IndexSizes | None = None

    @property
    def stored(self) -> LayerShape:
        """Latents, which are also the values, with their rotated part, and the keys of an indexer."""
        extra = () if self.index is None else (self.index.stored,)
        return LayerShape((1, self.latent.stored), (1, self.latent.rank), True, extra)

    @property
    def index_rope(self) -> nn.RopeSpec:
        """The rotation of an indexer's queries and keys, which pairs halves."""
        return replace(self.rope, interleaved=False)

    @property
    def scale(self) -> float:
        """The scale of scores, which grows with YaRN's context length."""
        scaling, scale = self.rope.scaling, self.latent.query_dim**-0.5
        if isinstance(scaling, nn.YarnScaling) and scaling.mscale_all_dim:
            scale *= scaling.magnitude(scaling.mscale_all_dim) ** 2
        return float(scale)


def parse_v2(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> DeepSeekConfig:
    refuse(
        raw,
        {
            "topk_method": ["greedy", "group_limited_greedy"],
            "scoring_func": ["softmax"],
            "norm_topk_prob": [False, None],
            "mlp_bias": [False],
        },
    )
    routing = group_routing(raw, corrected=False)
    return _parse(raw, generation, "DeepseekV2ForCausalLM", routing=routing)


def parse_v3(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> DeepSeekConfig:
    refuse(raw, {"topk_method": ["noaux_tc"], "scoring_func": ["sigmoid"]})
    interleaved = bool(raw["rope_interleave"])
    return _parse(raw, generation, "DeepseekV3ForCausalLM", interleaved, routing=group_routing(raw))


def parse_v32(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> DeepSeekConfig:
    refuse(raw, {"topk_method": ["noaux_tc"], "scoring_func": ["sigmoid"], "mlp_bias": [False]})
    layer_types(raw, (_INDEXED,), lambda _: _INDEXED)
    index = IndexSizes(raw["index_n_heads"], raw["index_head_dim"], raw["index_topk"])
    config = _parse(raw, generation, "DeepseekV32ForCausalLM", routing=group_routing(raw), index=index)
    rank, rope_dim = config.latent.query_rank, config.latent.rope_dim
    if rank is None or min(index.heads, index.top_k) < 1 or index.dim < rope_dim:
        raise ModelError(
            f"an indexer with {index.heads} heads of {index.dim} numbers that selects {index.top_k} tokens, "
            f"q_lora_rank={rank}, qk_rope_head_dim={rope_dim}; it needs a q_lora_rank, and heads at least as "
            "wide as the rotated part"
        )
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        return config
    if len(kinds) != config.layers or not {*kinds} <= {"dense", "sparse"}:
        raise ModelError(
            f"mlp_layer_types={kinds!r:.60}; they must be 'dense' or 'sparse', one for each layer"
        )
    return replace(config, sparse=tuple(kind == "sparse" for kind in kinds))


def _parse(
    raw: Mapping[str, Any],
    generation: Mapping[str, Any],
    architecture: str,
    interleaved: bool = True,
    **fields: Any,
) -> DeepSeekConfig:
    refuse(raw, {"hidden_act": ["silu", "swish"], "moe_layer_freq": [1]})
    common = common_fields(raw, generation, architecture)
    for name in _SIZES:
        if type(raw[name]) is not int or raw[name] < 1:
            raise ModelError(f"{name}={raw[name]!r}; it is a whole number >= 1")
    latent = LatentSizes(
        heads=common["heads"],
        rank=raw["kv_lora_rank"],
        rope_dim=raw["qk_rope_head_dim"],
        nope_dim=raw["qk_nope_head_dim"],
        v_dim=raw["v_head_dim"],
        query_rank=raw["q_lora_rank"],
        bias=common["attention_bias"],
    )
    dense = raw["first_k_dense_replace"] or 0
    return DeepSeekConfig(
        **(common | {"kv_heads": 1, "head_dim": latent.stored}),
        rope=replace(parse_rope(raw, latent.rope_dim), interleaved=interleaved),
        latent=latent,
        sparse=tuple(i >= dense for i in range(common["layers"])),
        experts=raw["n_routed_experts"],
        experts_per_token=experts_per_token(raw, raw["n_routed_experts"]),
        expert_size=raw["moe_intermediate_size"],
        shared_size=raw["moe_intermediate_size"] * (raw["n_shared_experts"] or 0),
        **fields,
    )


def make_cache(config: DeepSeekConfig, dtype: ml.DType | None = None) -> CausalCache:
    """An unbound cache; it does not depend on ``dtype``."""
    shift_extra = None if config.index is None else index_shift(config.index_rope)
    return CausalCache(nn.rope_shift(config.rope, config.latent.rank), shift_extra=shift_extra)


class DeepSeek(MoE[DeepSeekConfig]):
    cache_of = staticmethod(make_cache)

    @classmethod
    def mixer_shapes(cls, config: Any, i: int) -> dict[str, Shape]:
        hidden, latent = config.hidden_size, config.latent
        shapes = latent_shapes("self_attn", hidden, latent)
        if config.index is not None:
            shapes |= index_shapes("self_attn.indexer", hidden, latent.query_rank, config.index)
        return shapes

    def begin_pass(self, ctx: ml.Context, batch: Batch, cache: Cache) -> Step:
        step = super().begin_pass(ctx, batch, cache)
        if self.config.index is not None:
            step.rotations[INDEX_ROPE] = nn.Rotation(ctx, batch.positions, self.config.index_rope)
        return step

    def mixer(self, load: Loader, ctx: ml.Context, prefix: str, i: int) -> LatentAttention:
        config, attention, index = self.config, f"{prefix}.self_attn", self.config.index
        indexer = None if index is None else load_indexer(load, ctx, f"{attention}.indexer", index)
        return load_latent_attention(load, ctx, attention, config.latent, config.scale, indexer)
