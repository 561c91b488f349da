"""gpt-oss, written once on ml.nn: sliding and full layers by turns, attention sinks, experts.

OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025 (arXiv 2508.10925); transformers'
modeling_gpt_oss.py. Experts in MXFP4 are widened as they are read. Each head has a logit that takes part in
the softmax and is dropped; biases are everywhere; an expert's gate and up are stored by turns and clamped::

    (min(up, limit) + 1) * gate * sigmoid(alpha * gate)    gate <= limit, -limit <= up <= limit
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import ml
from kvcache import WrapperCache
from kvcache_engine.config import common_fields, experts_per_token, refuse
from kvcache_engine.models.attention import Attention, attention_shapes, load_attention
from kvcache_engine.models.decoder import CausalModel
from kvcache_engine.models.feedforward import Activation, SparseMLP, load_experts
from kvcache_engine.models.layer_types import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    SlidingConfig,
    sliding_cache,
    sliding_fields,
)
from kvcache_engine.weights import Loader, Shape
from ml.nn import parse_rope

__all__ = ["GptOss", "GptOssConfig", "parse"]

_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GptOssConfig(SlidingConfig):
    """``alpha`` and ``limit`` as above."""

    experts: int
    experts_per_token: int
    alpha: float
    limit: float


def parse(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> GptOssConfig:
    refuse(raw, {"hidden_act": ["silu", "swish"]})
    raw = {**raw, "rope_parameters": raw.get("rope_parameters") or _YARN}
    if (raw.get("quantization_config") or {}).get("quant_method") == "mxfp4":
        raw["quantization_config"] = None  # as the checkpoint's reader gives them, weights are not
    fields = common_fields(raw, generation, "GptOssForCausalLM")
    types = SLIDING_ATTENTION, FULL_ATTENTION
    rope = parse_rope(raw, fields["head_dim"])
    return GptOssConfig(
        **sliding_fields(raw, fields, lambda i: types[i % 2]),
        rope=rope,
        local_rope=rope,
        experts=raw["num_local_experts"],
        experts_per_token=experts_per_token(raw, raw["num_local_experts"]),
        alpha=float(raw["swiglu_alpha"]),
        limit=float(raw["swiglu_limit"]),
    )


class GptOss(CausalModel[GptOssConfig]):
    cache_type = WrapperCache
    cache_of = staticmethod(sliding_cache)

    @classmethod
    def mixer_shapes(cls, config: Any, i: int) -> dict[str, Shape]:
        return {**attention_shapes(config), "self_attn.sinks": (config.heads,)}

    @classmethod
    def mlp_shapes(cls, config: Any, i: int) -> dict[str, Shape]:
        hidden, inner, experts = config.hidden_size, config.intermediate_size, config.experts
        return {
            "mlp.router.weight": (experts, hidden),
            "mlp.router.bias": (experts,),
            "mlp.experts.gate_up_proj": (experts, hidden, 2 * inner),
            "mlp.experts.gate_up_proj_bias": (experts, 2 * inner),
            "mlp.experts.down_proj": (experts, inner, hidden),
            "mlp.experts.down_proj_bias": (experts, hidden),
        }

    def mixer(self, load: Loader, ctx: ml.Context, prefix: str, i: int) -> Attention:
        attention = f"{prefix}.self_attn"
        sinks = load.tensor(ctx, f"{attention}.sinks")
        return load_attention(load, ctx, attention, self.config, sinks=sinks)

    def mlp(self, load: Loader, ctx: ml.Context, prefix: str, i: int) -> SparseMLP:
        return SparseMLP(
            load.linear(ctx, f"{prefix}.mlp.router"),
            load_experts(load, ctx, f"{prefix}.mlp.experts", _clamped(self.config), _gate_first),
            self.config.experts_per_token,
            "softmax of top",
        )


def _gate_first(rows: np.ndarray) -> np.ndarray:
    """Rows gate, up, gate, up, ... as all of gate, then all of up."""
    return np.concatenate((rows[::2], rows[1::2]))


def _clamped(config: GptOssConfig) -> Activation:
    alpha, limit = config.alpha, config.limit

    def activation(ctx: ml.Context, gate: ml.Tensor, up: ml.Tensor) -> ml.Tensor:
        gate, up = gate.clamp(ctx, None, limit), up.clamp(ctx, -limit, limit)
        gated = gate.mul(ctx, gate.scale(ctx, alpha).sigmoid(ctx))
        return gated.add(ctx, up.mul(ctx, gated))

    return activation
