"""Qwen3-Next and the text model of Qwen3.5, written once on ml.nn: gated delta nets and gated attention.

transformers' modeling_qwen3_next.py and modeling_qwen3_5.py::

    hidden += delta_net(norm(hidden))        three layers of four: linear in the length
    hidden += attention(norm(hidden))        the others: the output times the sigmoid of a gate
    hidden += mlp(norm(hidden))              dense (Qwen3.5), or experts and a shared expert

Norms are stored around zero: their weight is 1 + w. Attention rotates a part of each head only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import ml
from kvcache import StateSpec
from kvcache_engine.config import common_fields, experts_per_token, refuse
from kvcache_engine.errors import ModelError
from kvcache_engine.models.attention import Attention, attention_shapes, load_attention
from kvcache_engine.models.delta_net import DeltaNet, DeltaSizes, delta_shapes, load_delta_net
from kvcache_engine.models.feedforward import (
    GatedMLP,
    SparseMLP,
    expert_shapes,
    load_each_expert,
    load_mlp,
    mlp_shapes,
)
from kvcache_engine.models.layer_types import FULL_ATTENTION, layer_types
from kvcache_engine.models.recurrent import RecurrentModel, StateConfig
from kvcache_engine.weights import Loader, Shape
from ml.nn import parse_rope

__all__ = ["Qwen3Next", "Qwen3NextConfig", "parse", "parse_dense"]

_LINEAR_ATTENTION = "linear_attention"


@dataclass(frozen=True, slots=True)
class Qwen3NextConfig(StateConfig):
    """``split``: a delta net's projections are stored separately (Qwen3.5), not joined by key head.
    ``sparse[i]``: layer i has experts of ``expert_size`` and a shared one.
    """

    kinds: tuple[str, ...]
    delta: DeltaSizes
    split: bool
    sparse: tuple[bool, ...]
    experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    shared_size: int = 0
    normalize: bool = True

    @property
    def attending(self) -> Sequence[int]:
        return [i for i, kind in enumerate(self.kinds) if kind == FULL_ATTENTION]

    @property
    def states(self) -> dict[str, StateSpec]:
        return self.delta.states


def parse(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> Qwen3NextConfig:
    experts, step = raw["num_experts"], raw["decoder_sparse_step"]
    dense = raw.get("mlp_only_layers") or ()
    count = raw["num_hidden_layers"]
    return _parse(
        raw,
        generation,
        "Qwen3NextForCausalLM",
        split=False,
        sparse=tuple(i not in dense and experts > 0 and (i + 1) % step == 0 for i in range(count)),
        experts=experts,
        experts_per_token=experts_per_token(raw, experts),
        expert_size=raw["moe_intermediate_size"],
        shared_size=raw["shared_expert_intermediate_size"],
        normalize=bool(raw["norm_topk_prob"]),
    )


def parse_dense(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> Qwen3NextConfig:
    sparse = (False,) * raw["num_hidden_layers"]
    return _parse(raw, generation, "Qwen3_5ForCausalLM", split=True, sparse=sparse)


def _parse(
    raw: Mapping[str, Any], generation: Mapping[str, Any], architecture: str, **fields: Any
) -> Qwen3NextConfig:
    refuse(raw, {"hidden_act": ["silu", "swish"]})
    common = common_fields(raw, generation, architecture)
    interval = raw["full_attention_interval"]
    types = _LINEAR_ATTENTION, FULL_ATTENTION
    kinds = layer_types(raw, types, lambda i: types[(i + 1) % interval == 0])
    delta = DeltaSizes(
        key_heads=raw["linear_num_key_heads"],
        value_heads=raw["linear_num_value_heads"],
        key_dim=raw["linear_key_head_dim"],
        value_dim=raw["linear_value_head_dim"],
        kernel=raw["linear_conv_kernel_dim"],
    )
    if delta.value_heads % delta.key_heads:
        raise ModelError(f"{delta.value_heads} linear value heads for {delta.key_heads} key heads")
    return Qwen3NextConfig(
        **(common | {"qk_norm": True}),
        rope=parse_rope(raw, common["head_dim"], partial=True),
        kinds=kinds,
        delta=delta,
        **fields,
    )


class Qwen3Next(RecurrentModel[Qwen3NextConfig]):
    norm_offset = 1.0

    @classmethod
    def mixer_shapes(cls, config: Any, i: int) -> dict[str, Shape]:
        if config.kinds[i] == FULL_ATTENTION:
            return attention_shapes(config, gates=config.heads * config.head_dim)
        return delta_shapes("linear_attn", config.hidden_size, config.delta, config.split)

    @classmethod
    def mlp_shapes(cls, config: Any, i: int) -> dict[str, Shape]:
        hidden = config.hidden_size
        if not config.sparse[i]:
            return super().mlp_shapes(config, i)
        return {
            "mlp.gate.weight": (config.experts, hidden),
            "mlp.shared_expert_gate.weight": (1, hidden),
            **expert_shapes("mlp.experts", config.experts, hidden, config.expert_size),
            **mlp_shapes("mlp.shared_expert", hidden, config.shared_size),
        }

    def mixer(self, load: Loader, ctx: ml.Context, prefix: str, i: int) -> Attention | DeltaNet:
        config = self.config
        if config.kinds[i] == FULL_ATTENTION:
            return self._attention(load, ctx, f"{prefix}.self_attn")
        mixer = f"{prefix}.linear_attn"
        return load_delta_net(load, ctx, mixer, i, config.delta, config.split, config.rms_norm_eps)

    def mlp(self, load: Loader, ctx: ml.Context, prefix: str, i: int) -> GatedMLP | SparseMLP:
        prefix = f"{prefix}.mlp"
        if not self.config.sparse[i]:
            return load_mlp(load, ctx, prefix)
        return SparseMLP(
            load.linear(ctx, f"{prefix}.gate"),
            load_each_expert(load, ctx, f"{prefix}.experts", self.config.experts),
            self.config.experts_per_token,
            "normalized" if self.config.normalize else "softmax",
            load_mlp(load, ctx, f"{prefix}.shared_expert"),
            load.linear(ctx, f"{prefix}.shared_expert_gate"),
        )

    def _attention(self, load: Loader, ctx: ml.Context, prefix: str) -> Attention:
        """The queries' projection alternates each head's query and gate; the gates are moved to the end."""
        config, rows = self.config, self.config.heads * self.config.head_dim

        def apart(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            both = array.reshape(config.heads, 2, config.head_dim, *array.shape[1:])
            return both[:, 0].reshape(rows, *array.shape[1:]), both[:, 1].reshape(rows, *array.shape[1:])

        query, gate = apart(load.take(f"{prefix}.q_proj.weight"))
        weights = [query, *(load.take(f"{prefix}.{name}_proj.weight") for name in "kv"), gate]
        biases: list[np.ndarray] = []
        if config.attention_bias:
            query, gate = apart(load.take(f"{prefix}.q_proj.bias"))
            biases = [query, *(load.take(f"{prefix}.{name}_proj.bias") for name in "kv"), gate]
        qkv = load.joined(ctx, weights, biases)
        return load_attention(load, ctx, prefix, config, 1.0, qkv=qkv, gated=True)
