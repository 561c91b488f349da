"""Llama's attention with experts: Mixtral, Qwen3-MoE and GLM-4.5, written once on ml.nn.

transformers' modeling_mixtral.py, modeling_qwen3_moe.py and modeling_glm4_moe.py::

    hidden += attention(norm(hidden))    Qwen3 and some of GLM: queries and keys normalised by head
                                         GLM: half of each head is rotated
    hidden += mlp(norm(hidden))          experts, or dense in some layers; GLM: beside a shared one, chosen
                                         within groups as DeepSeek-V3 does

GLM's layer that predicts further tokens (num_nextn_predict_layers) is read with ``with_mtp`` (mtp.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml
from kvcache.cache import ShiftFunction
from kvcache.runner.config import ModelConfig, common_fields, refuse
from kvcache.runner.models.attention import attention_shapes, load_attention, qk_norm
from kvcache.runner.models.decoder import CausalModel, Layer, model_shapes
from kvcache.runner.models.feedforward import load_mlp, mlp_shapes
from kvcache.runner.models.llama import check_window, make_cache
from kvcache.runner.models.mtp import load_mtp
from kvcache.runner.models.prenorm import PreNormLayer, load_norms, norm_shapes
from kvcache.runner.models.routing import (
    GroupLimited,
    Routing,
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

__all__ = ["MoE", "MoEConfig", "make_cache", "parse_glm4", "parse_mixtral", "parse_qwen3", "shapes"]

MIXTRAL_NAMES = ("w1", "w3", "w2")
"""What Mixtral calls the gate, up and down projections of an expert."""


@dataclass(frozen=True, slots=True)
class MoEConfig(ModelConfig):
    """``sparse[i]``: layer i has experts, of ``expert_size``, stored below ``block``, beside one MLP of
    ``shared_size`` (0: none). ``names`` are those of an expert's gate, up and down projections.
    """

    sparse: tuple[bool, ...]
    experts: int
    experts_per_token: int
    expert_size: int
    shared_size: int
    routing: Routing | GroupLimited
    block: str = "mlp"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    mtp: bool = False

    def with_mtp(self) -> MoEConfig:
        """With the layer behind the last one, for multi-token prediction; it has experts."""
        return replace(self, mtp=True, sparse=(*self.sparse, True))

    @property
    def cached_layers(self) -> dict[int, LayerShape]:
        widths = self.kv_heads, self.head_dim
        return dict.fromkeys(range(self.layers + self.mtp), LayerShape(widths, widths))

    @property
    def corrected(self) -> bool:
        """Whether experts are chosen by scores with a correction added."""
        return isinstance(self.routing, GroupLimited)


def parse_mixtral(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> MoEConfig:
    """MixtralForCausalLM."""
    check_window(raw)
    return _parse(
        raw, generation, "MixtralForCausalLM", sparse=(True,) * raw["num_hidden_layers"],
        experts=raw["num_local_experts"], expert_size=raw["intermediate_size"], routing="normalized",
        block="block_sparse_moe", names=MIXTRAL_NAMES,
    )  # fmt: skip


def parse_qwen3(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> MoEConfig:
    """Qwen3MoeForCausalLM."""
    check_window(raw)
    experts = raw.get("num_experts", raw["num_local_experts"])
    dense, step = raw.get("mlp_only_layers") or (), raw["decoder_sparse_step"]
    sparse = tuple(i not in dense and (i + 1) % step == 0 for i in range(raw["num_hidden_layers"]))
    routing: Routing = "normalized" if raw["norm_topk_prob"] else "softmax"
    return _parse(
        raw, generation, "Qwen3MoeForCausalLM", sparse=sparse, experts=experts,
        expert_size=raw["moe_intermediate_size"], routing=routing, qk_norm=True,
    )  # fmt: skip


def parse_glm4(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> MoEConfig:
    """Glm4MoeForCausalLM."""
    dense = raw["first_k_dense_replace"] or 0
    return _parse(
        raw, generation, "Glm4MoeForCausalLM", partial=True,
        sparse=tuple(i >= dense for i in range(raw["num_hidden_layers"])),
        experts=raw["n_routed_experts"], expert_size=raw["moe_intermediate_size"],
        shared_size=raw["moe_intermediate_size"] * (raw["n_shared_experts"] or 0),
        routing=group_routing(raw, True, bool(raw["norm_topk_prob"])),
        qk_norm=bool(raw["use_qk_norm"]), output_bias=False,
    )  # fmt: skip


def _parse(
    raw: Mapping[str, Any], generation: Mapping[str, Any], architecture: str, partial: bool = False,
    **fields: Any,
) -> MoEConfig:  # fmt: skip
    refuse(raw, {"hidden_act": ["silu", "swish"]})
    common = common_fields(raw, generation, architecture)
    rope = parse_rope(raw, common["head_dim"], partial=partial)
    common |= {"rope": rope, "experts_per_token": raw["num_experts_per_tok"]}
    return MoEConfig(**{"shared_size": 0, **common, **fields})


def shapes(config: MoEConfig) -> dict[str, Shape]:
    """The name and shape of every tensor."""
    return model_shapes(config, lambda i: _layer_shapes(config, i), mtp=config.mtp)


def _layer_shapes(config: MoEConfig, i: int) -> dict[str, Shape]:
    hidden, block = config.hidden_size, config.block
    found = norm_shapes(hidden) | attention_shapes(config, config.qk_norm)
    if not config.sparse[i]:
        return found | mlp_shapes("mlp", hidden, config.intermediate_size)
    found[f"{block}.gate.weight"] = (config.experts, hidden)
    if config.corrected:
        found[f"{block}.gate.e_score_correction_bias"] = (config.experts,)
    if config.shared_size:
        found |= mlp_shapes(f"{block}.shared_experts", hidden, config.shared_size)
    return found | expert_shapes(f"{block}.experts", config.experts, hidden, config.expert_size, config.names)


class MoE(CausalModel[MoEConfig]):
    """The weights of a model and its forward pass, on any cache.

    ``shift`` is the function by which a cache moves this model's keys to other positions.
    """

    cache_type = object
    cache_of = staticmethod(make_cache)
    shapes = staticmethod(shapes)

    @property
    def shift(self) -> ShiftFunction:
        return nn.rope_shift(self.config.rope)

    def _layer(self, load: Loader, ctx: ml.Context, i: int) -> Layer:
        config, prefix = self.config, f"model.layers.{i}"
        attention = f"{prefix}.self_attn"
        norm = qk_norm(load, ctx, attention, config) if config.qk_norm else None
        mlp = self._sparse(load, ctx, f"{prefix}.{config.block}") if config.sparse[i] else None
        return PreNormLayer(
            eps=config.rms_norm_eps,
            norms=load_norms(load, ctx, prefix),
            mixer=load_attention(load, ctx, attention, config, qk_norm=norm),
            mlp=mlp or load_mlp(load, ctx, f"{prefix}.mlp"),
        )

    def _load_more(self, load: Loader, ctx: ml.Context) -> None:
        if self.config.mtp:
            layer = self._layer(load, ctx, self.config.layers)
            self.mtp = load_mtp(load, ctx, self, layer, self._head)

    def _sparse(self, load: Loader, ctx: ml.Context, prefix: str) -> SparseMLP:
        config, routing = self.config, self.config.routing
        if isinstance(routing, GroupLimited):
            router, routing = load_corrected(load, ctx, f"{prefix}.gate", routing)
        else:
            router = load.linear(ctx, f"{prefix}.gate")
        return SparseMLP(
            router,
            load_each_expert(load, ctx, f"{prefix}.experts", config.experts, config.names),
            config.experts_per_token,
            routing,
            load_mlp(load, ctx, f"{prefix}.shared_experts") if config.shared_size else None,
        )
