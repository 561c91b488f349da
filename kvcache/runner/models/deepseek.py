"""DeepSeek-V2, V3 and V3.2, written once on ml.nn: latent attention, and experts chosen within groups.

DeepSeek-AI, "DeepSeek-V2", 2024 (arXiv 2405.04434), and "DeepSeek-V3 Technical Report", 2024 (arXiv
2412.19437), "DeepSeek-V3.2", 2025; transformers' modeling_deepseek_v2.py, _v3.py and _v32.py::

    hidden += latent_attention(norm(hidden))     one KV head of rank + rope_dim numbers is stored
                                                 V3.2: to the tokens that an indexer chooses
    hidden += mlp(norm(hidden))                  dense in the first layers, then experts and shared ones

The layer that predicts further tokens (num_nextn_predict_layers) is read with ``with_mtp`` (mtp.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml
from kvcache.cache import Batch, Cache, ShiftFunction
from kvcache.caches.causal import CausalCache
from kvcache.runner.config import ModelConfig, common_fields, refuse
from kvcache.runner.errors import ModelError
from kvcache.runner.models.decoder import CausalModel, Layer, Step, model_shapes
from kvcache.runner.models.feedforward import load_mlp, mlp_shapes
from kvcache.runner.models.indexer import (
    INDEX_ROPE,
    IndexSizes,
    index_shapes,
    index_shift,
    load_indexer,
)
from kvcache.runner.models.latent import LatentSizes, latent_shapes, load_latent_attention
from kvcache.runner.models.layer_types import layer_types
from kvcache.runner.models.mtp import load_mtp
from kvcache.runner.models.prenorm import PreNormLayer, load_norms, norm_shapes
from kvcache.runner.models.routing import (
    GroupLimited,
    SparseMLP,
    expert_shapes,
    group_routing,
    load_corrected,
    load_each_expert,
)
from kvcache.runner.rope_config import parse_rope
from kvcache.runner.weights import Loader, Shape
from kvcache.storage.layer_shape import LayerShape
from ml import nn

__all__ = ["DeepSeek", "DeepSeekConfig", "make_cache", "parse_v2", "parse_v3", "parse_v32", "shapes"]

_INDEXED = "indexed_attention"
_SIZES = "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "moe_intermediate_size"


@dataclass(frozen=True, slots=True)
class DeepSeekConfig(ModelConfig):
    """``kv_heads`` is 1, and ``head_dim`` what is stored of a token.

    ``sparse[i]`` says whether layer i has experts, of ``expert_size``, beside shared ones that are one MLP of
    ``shared_size`` (0: none). ``corrected``: a sigmoid scores experts, and a correction is added to choose.
    """

    latent: LatentSizes
    sparse: tuple[bool, ...]
    experts: int
    experts_per_token: int
    expert_size: int
    shared_size: int
    routing: GroupLimited
    corrected: bool
    index: IndexSizes | None = None
    mtp: bool = False

    def with_mtp(self) -> DeepSeekConfig:
        """With the layer behind the last one, for multi-token prediction; it has experts."""
        return replace(self, mtp=True, sparse=(*self.sparse, True))

    @property
    def cached_layers(self) -> dict[int, LayerShape]:
        """Latents, which are the values too, with their rotated numbers, and the keys of an indexer."""
        extra = () if self.index is None else (self.index.stored,)
        shape = LayerShape((1, self.latent.stored), (1, self.latent.rank), True, extra)
        return dict.fromkeys(range(self.layers + self.mtp), shape)

    @property
    def index_rope(self) -> nn.RopeSpec:
        """The rotation of an indexer's queries and keys: by halves."""
        return replace(self.rope, interleaved=False)

    @property
    def scale(self) -> float:
        """Of scores; grows with the context that YaRN stretches to."""
        scaling, scale = self.rope.scaling, self.latent.query_dim**-0.5
        if isinstance(scaling, nn.YarnScaling) and scaling.mscale_all_dim:
            scale *= scaling.magnitude(scaling.mscale_all_dim) ** 2
        return float(scale)


def parse_v2(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> DeepSeekConfig:
    """DeepseekV2ForCausalLM."""
    refuse(
        raw,
        {
            "topk_method": ["greedy", "group_limited_greedy"],
            "scoring_func": ["softmax"],
            "norm_topk_prob": [False, None],
            "mlp_bias": [False],
        },
    )
    grouped = raw["topk_method"] == "group_limited_greedy"
    routing = group_routing(raw, grouped, normalize=False)
    return _parse(raw, generation, "DeepseekV2ForCausalLM", routing=routing, corrected=False)


def parse_v3(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> DeepSeekConfig:
    """DeepseekV3ForCausalLM."""
    refuse(raw, {"topk_method": ["noaux_tc"], "scoring_func": ["sigmoid"]})
    routing = group_routing(raw, True, normalize=bool(raw["norm_topk_prob"]))
    interleaved = bool(raw["rope_interleave"])
    return _parse(raw, generation, "DeepseekV3ForCausalLM", interleaved, routing=routing, corrected=True)


def parse_v32(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> DeepSeekConfig:
    """DeepseekV32ForCausalLM."""
    refuse(raw, {"topk_method": ["noaux_tc"], "scoring_func": ["sigmoid"], "mlp_bias": [False]})
    layer_types(raw, (_INDEXED,), lambda _: _INDEXED)
    routing = group_routing(raw, True, normalize=bool(raw["norm_topk_prob"]))
    index = IndexSizes(raw["index_n_heads"], raw["index_head_dim"], raw["index_topk"])
    config = _parse(raw, generation, "DeepseekV32ForCausalLM", routing=routing, corrected=True, index=index)
    rank, rope_dim = config.latent.query_rank, config.latent.rope_dim
    if rank is None or min(index.heads, index.top_k) < 1 or index.dim < rope_dim:
        raise ModelError(
            f"an indexer of {index.heads} heads of {index.dim} numbers that chooses {index.top_k} tokens, "
            f"q_lora_rank={rank}, qk_rope_head_dim={rope_dim}; it needs a q_lora_rank, and heads at least as "
            "wide as what is rotated"
        )
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        return config
    if len(kinds) != config.layers or not {*kinds} <= {"dense", "sparse"}:
        raise ModelError(f"mlp_layer_types={kinds!r:.60}; they are 'dense' or 'sparse', one for each layer")
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
        experts_per_token=raw["num_experts_per_tok"],
        expert_size=raw["moe_intermediate_size"],
        shared_size=raw["moe_intermediate_size"] * (raw["n_shared_experts"] or 0),
        **fields,
    )


def shapes(config: DeepSeekConfig) -> dict[str, Shape]:
    """The name and shape of every tensor."""
    return model_shapes(config, lambda i: _layer_shapes(config, i), mtp=config.mtp)


def _layer_shapes(config: DeepSeekConfig, i: int) -> dict[str, Shape]:
    hidden = config.hidden_size
    found = norm_shapes(hidden) | latent_shapes("self_attn", hidden, config.latent)
    if config.index is not None and config.latent.query_rank is not None:
        found |= index_shapes("self_attn.indexer", hidden, config.latent.query_rank, config.index)
    if not config.sparse[i]:
        return found | mlp_shapes("mlp", hidden, config.intermediate_size)
    found["mlp.gate.weight"] = (config.experts, hidden)
    if config.corrected:
        found["mlp.gate.e_score_correction_bias"] = (config.experts,)
    if config.shared_size:
        found |= mlp_shapes("mlp.shared_experts", hidden, config.shared_size)
    return found | expert_shapes("mlp.experts", config.experts, hidden, config.expert_size)


def make_cache(config: DeepSeekConfig, dtype: ml.DType | None = None) -> CausalCache:
    """Of any ``dtype`` alike."""
    shift_extra = None if config.index is None else index_shift(config.index_rope)
    return CausalCache(nn.rope_shift(config.rope, config.latent.rank), shift_extra=shift_extra)


class DeepSeek(CausalModel[DeepSeekConfig]):
    """The weights of a model and its forward pass, on any cache that stores latents.

    ``shift`` is the function by which a cache moves this model's keys to other positions.
    """

    cache_type = object
    cache_of = staticmethod(make_cache)
    shapes = staticmethod(shapes)

    @property
    def shift(self) -> ShiftFunction:
        return nn.rope_shift(self.config.rope, self.config.latent.rank)

    def begin_pass(self, ctx: ml.Context, batch: Batch, cache: Cache) -> Step:
        step = super().begin_pass(ctx, batch, cache)
        if self.config.index is not None:
            step.rotations[INDEX_ROPE] = nn.Rotation(ctx, batch.positions, self.config.index_rope)
        return step

    def _layer(self, load: Loader, ctx: ml.Context, i: int) -> Layer:
        config, prefix = self.config, f"model.layers.{i}"
        build = self._sparse if config.sparse[i] else load_mlp
        attention, index = f"{prefix}.self_attn", config.index
        indexer = None if index is None else load_indexer(load, ctx, f"{attention}.indexer", index)
        return PreNormLayer(
            eps=config.rms_norm_eps,
            norms=load_norms(load, ctx, prefix),
            mixer=load_latent_attention(load, ctx, attention, config.latent, config.scale, indexer),
            mlp=build(load, ctx, f"{prefix}.mlp"),
        )

    def _load_more(self, load: Loader, ctx: ml.Context) -> None:
        if self.config.mtp:
            layer = self._layer(load, ctx, self.config.layers)
            self.mtp = load_mtp(load, ctx, self, layer, self._head)

    def _sparse(self, load: Loader, ctx: ml.Context, prefix: str) -> SparseMLP:
        config = self.config
        router, routing = load_corrected(load, ctx, f"{prefix}.gate", config.routing, config.corrected)
        return SparseMLP(
            router,
            load_each_expert(load, ctx, f"{prefix}.experts", config.experts),
            config.experts_per_token,
            routing,
            load_mlp(load, ctx, f"{prefix}.shared_experts") if config.shared_size else None,
        )
