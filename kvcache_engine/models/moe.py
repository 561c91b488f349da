"""Llama's attention with experts: Mixtral, Qwen3-MoE and GLM-4.5, written once on ml.nn.

transformers' modeling_mixtral.py, modeling_qwen3_moe.py and modeling_glm4_moe.py::

    hidden += attention(norm(hidden))    Qwen3 and some of GLM: queries and keys normalised by head
                                         GLM: half of each head is rotated
    hidden += mlp(norm(hidden))          experts, or dense in some layers; GLM: with a shared one, selected
    within groups as in DeepSeek-V3

GLM's layer for multi-token prediction (num_nextn_predict_layers) is loaded by ``with_mtp`` (mtp.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import ml
from kvcache_engine.config import ModelConfig, common_fields, experts_per_token, refuse
from kvcache_engine.models.decoder import CausalModel
from kvcache_engine.models.feedforward import (
    GatedMLP,
    GroupLimited,
    Routing,
    SparseMLP,
    expert_shapes,
    group_routing,
    load_corrected,
    load_each_expert,
    load_mlp,
    mlp_shapes,
)
from kvcache_engine.models.llama import check_window, qwen_window
from kvcache_engine.models.mtp import load_mtp, mtp_shapes
from kvcache_engine.weights import Loader, Shape
from ml.nn import parse_rope

__all__ = ["MoE", "MoEConfig", "parse_glm4", "parse_mixtral", "parse_qwen3"]

MIXTRAL_NAMES = ("w1", "w3", "w2")
"""Mixtral's names for the gate, up and down projections of an expert."""


@dataclass(frozen=True, slots=True)
class MoEConfig(ModelConfig):
    """``sparse[i]``: layer i has experts of ``expert_size``, stored under ``block``, and a shared MLP of
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

    def with_mtp(self) -> Self:
        """The config with the layer after the last one, for multi-token prediction; it has experts."""
        return replace(self, mtp=True, sparse=(*self.sparse, True))

    @property
    def attending(self) -> Sequence[int]:
        return range(self.layers + self.mtp)


def parse_mixtral(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> MoEConfig:
    check_window(raw, raw["sliding_window"])
    return _parse(
        raw, generation, "MixtralForCausalLM", sparse=(True,) * raw["num_hidden_layers"],
        experts=raw["num_local_experts"], expert_size=raw["intermediate_size"], routing="normalized",
        block="block_sparse_moe", names=MIXTRAL_NAMES,
    )  # fmt: skip


def parse_qwen3(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> MoEConfig:
    check_window(raw, qwen_window(raw))
    experts = raw.get("num_experts", raw["num_local_experts"])
    dense, step = raw.get("mlp_only_layers") or (), raw["decoder_sparse_step"]
    sparse = tuple(i not in dense and (i + 1) % step == 0 for i in range(raw["num_hidden_layers"]))
    routing: Routing = "normalized" if raw["norm_topk_prob"] else "softmax"
    return _parse(
        raw, generation, "Qwen3MoeForCausalLM", sparse=sparse, experts=experts,
        expert_size=raw["moe_intermediate_size"], routing=routing, qk_norm=True,
    )  # fmt: skip


def parse_glm4(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> MoEConfig:
    dense = raw["first_k_dense_replace"] or 0
    return _parse(
        raw, generation, "Glm4MoeForCausalLM", partial=True,
        sparse=tuple(i >= dense for i in range(raw["num_hidden_layers"])),
        experts=raw["n_routed_experts"], expert_size=raw["moe_intermediate_size"],
        shared_size=raw["moe_intermediate_size"] * (raw["n_shared_experts"] or 0),
        routing=group_routing(raw),
        qk_norm=bool(raw["use_qk_norm"]), output_bias=False,
    )  # fmt: skip


def _parse(
    raw: Mapping[str, Any], generation: Mapping[str, Any], architecture: str, partial: bool = False,
    **fields: Any,
) -> MoEConfig:  # fmt: skip
    refuse(raw, {"hidden_act": ["silu", "swish"]})
    common = common_fields(raw, generation, architecture)
    rope = parse_rope(raw, common["head_dim"], partial=partial)
    common |= {"rope": rope, "experts_per_token": experts_per_token(raw, fields["experts"])}
    return MoEConfig(**{"shared_size": 0, **common, **fields})


M = TypeVar("M", bound=MoEConfig)


class MoE(CausalModel[M]):
    @classmethod
    def shapes(cls, config: Any) -> dict[str, Shape]:
        shapes, last = super().shapes(config), config.layers
        if config.mtp:
            shapes |= cls.numbered(cls.layer_shapes(config, last) | mtp_shapes(config.hidden_size), last)
        return shapes

    @classmethod
    def mlp_shapes(cls, config: Any, i: int) -> dict[str, Shape]:
        hidden, block, experts = config.hidden_size, config.block, config.experts
        if not config.sparse[i]:
            return super().mlp_shapes(config, i)
        shapes: dict[str, Shape] = {f"{block}.gate.weight": (experts, hidden)}
        if isinstance(config.routing, GroupLimited) and config.routing.corrected:
            shapes[f"{block}.gate.e_score_correction_bias"] = (experts,)
        if config.shared_size:
            shapes |= mlp_shapes(f"{block}.shared_experts", hidden, config.shared_size)
        return shapes | expert_shapes(f"{block}.experts", experts, hidden, config.expert_size, config.names)

    def mlp(self, load: Loader, ctx: ml.Context, prefix: str, i: int) -> GatedMLP | SparseMLP:
        config, routing, block = self.config, self.config.routing, f"{prefix}.{self.config.block}"
        if not config.sparse[i]:
            return load_mlp(load, ctx, f"{prefix}.mlp")
        if isinstance(routing, GroupLimited):
            router, routing = load_corrected(load, ctx, f"{block}.gate", routing)
        else:
            router = load.linear(ctx, f"{block}.gate")
        return SparseMLP(
            router,
            load_each_expert(load, ctx, f"{block}.experts", config.experts, config.names),
            config.experts_per_token,
            routing,
            load_mlp(load, ctx, f"{block}.shared_experts") if config.shared_size else None,
        )

    def _load_more(self, load: Loader, ctx: ml.Context) -> None:
        if self.config.mtp:
            layer = self._layer(load, ctx, self.config.layers)
            self.mtp = load_mtp(load, ctx, self, layer, self._head)
