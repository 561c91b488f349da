"""Qwen3-Next and the text model of Qwen3.5, written once on ml.nn: gated delta nets and gated attention.

transformers' modeling_qwen3_next.py and modeling_qwen3_5.py::

    hidden += delta_net(norm(hidden))        three layers of four: linear in the length, see delta.py
    hidden += attention(norm(hidden))        the others: the output times the sigmoid of a gate
    hidden += mlp(norm(hidden))              dense (Qwen3.5), or experts and a shared expert

Norms are stored around zero: their weight is 1 + w. Attention rotates a part of each head only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import ml
from kvcache.cache import Batch, Cache
from kvcache.caches.recurrent import RecurrentCache
from kvcache.runner.config import ModelConfig, common_fields, refuse
from kvcache.runner.errors import ModelError
from kvcache.runner.models.attention import Attention, attention_shapes, load_attention, qk_norm
from kvcache.runner.models.decoder import CausalModel, Layer, Step, model_shapes
from kvcache.runner.models.delta_net import DeltaNet, DeltaSizes, delta_shapes, load_delta_net
from kvcache.runner.models.feedforward import load_mlp, mlp_shapes
from kvcache.runner.models.layer_types import FULL_ATTENTION, layer_types
from kvcache.runner.models.prenorm import PreNormLayer, load_norms, norm_shapes
from kvcache.runner.models.routing import SparseMLP, expert_shapes, load_each_expert
from kvcache.runner.models.state_runs import begin_runs
from kvcache.runner.rope_config import parse_rope
from kvcache.runner.weights import Loader, Shape
from kvcache.storage.layer_shape import LayerShape
from ml import nn

__all__ = ["Qwen3Next", "Qwen3NextConfig", "make_cache", "parse", "parse_dense", "shapes"]

_LINEAR_ATTENTION = "linear_attention"


@dataclass(frozen=True, slots=True)
class Qwen3NextConfig(ModelConfig):
    """``split``: a delta net's projections are stored apart (Qwen3.5), not joined by key head.

    ``sparse[i]`` says whether layer i has experts, of ``expert_size``, beside a shared one.
    """

    kinds: tuple[str, ...]
    delta: DeltaSizes
    split: bool
    sparse: tuple[bool, ...]
    experts: int
    experts_per_token: int
    expert_size: int
    shared_size: int
    normalize: bool

    @property
    def cached_layers(self) -> dict[int, LayerShape]:
        """Of the layers with attention; the others keep states."""
        shape = LayerShape((self.kv_heads, self.head_dim), (self.kv_heads, self.head_dim))
        return {i: shape for i, kind in enumerate(self.kinds) if kind == FULL_ATTENTION}

    def state_bytes(self, max_sequences: int, capacity: int) -> int:
        """Of states in F32, and as many checkpoints as RecurrentCache takes by default."""
        sizes = self.delta
        values = sizes.channels * (sizes.kernel - 1) + sizes.value_heads * sizes.key_dim * sizes.value_dim
        checkpoints = min(24, capacity // 256)
        return self.kinds.count(_LINEAR_ATTENTION) * max_sequences * (1 + checkpoints) * values * 4


def parse(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> Qwen3NextConfig:
    """Qwen3NextForCausalLM."""
    experts, step = raw["num_experts"], raw["decoder_sparse_step"]
    dense = raw.get("mlp_only_layers") or ()
    count = raw["num_hidden_layers"]
    return _parse(
        raw,
        generation,
        architecture="Qwen3NextForCausalLM",
        split=False,
        sparse=tuple(i not in dense and experts > 0 and (i + 1) % step == 0 for i in range(count)),
        experts=experts,
        experts_per_token=raw["num_experts_per_tok"],
        expert_size=raw["moe_intermediate_size"],
        shared_size=raw["shared_expert_intermediate_size"],
        normalize=bool(raw["norm_topk_prob"]),
    )


def parse_dense(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> Qwen3NextConfig:
    """Qwen3_5ForCausalLM."""
    return _parse(
        raw,
        generation,
        architecture="Qwen3_5ForCausalLM",
        split=True,
        sparse=(False,) * raw["num_hidden_layers"],
        experts=0,
        experts_per_token=0,
        expert_size=0,
        shared_size=0,
        normalize=True,
    )


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


def shapes(config: Qwen3NextConfig) -> dict[str, Shape]:
    """The name and shape of every tensor."""
    return model_shapes(config, lambda i: _layer_shapes(config, i))


def _layer_shapes(config: Qwen3NextConfig, i: int) -> dict[str, Shape]:
    hidden = config.hidden_size
    found: dict[str, Shape] = norm_shapes(hidden)
    if config.kinds[i] == FULL_ATTENTION:
        found |= attention_shapes(config, qk_norm=True, gates=config.heads * config.head_dim)
    else:
        found |= delta_shapes("linear_attn", hidden, config.delta, config.split)
    if not config.sparse[i]:
        return found | mlp_shapes("mlp", hidden, config.intermediate_size)
    found |= {
        "mlp.gate.weight": (config.experts, hidden),
        "mlp.shared_expert_gate.weight": (1, hidden),
    }
    found |= expert_shapes("mlp.experts", config.experts, hidden, config.expert_size)
    return found | mlp_shapes("mlp.shared_expert", hidden, config.shared_size)


def make_cache(config: Qwen3NextConfig, dtype: ml.DType | None = None, **options: Any) -> RecurrentCache:
    """A cache for the states of the linear layers and the keys of the others.

    ``dtype`` is that of the model's activations; ``options`` go to RecurrentCache.
    """
    sizes = config.delta
    return RecurrentCache(
        (sizes.channels, sizes.kernel - 1),
        (sizes.value_heads, sizes.key_dim, sizes.value_dim),
        nn.rope_shift(config.rope),
        conv_dtype=dtype,
        delivers=True,
        **options,
    )


class Qwen3Next(CausalModel[Qwen3NextConfig]):
    """The weights of a model and its forward pass."""

    cache_type = RecurrentCache
    norm_offset = 1.0
    cache_of = staticmethod(make_cache)
    shapes = staticmethod(shapes)

    def begin_pass(self, ctx: ml.Context, batch: Batch, cache: Cache) -> Step:
        return begin_runs(ctx, super().begin_pass(ctx, batch, cache))

    def _layer(self, load: Loader, ctx: ml.Context, i: int) -> Layer:
        config, prefix = self.config, f"model.layers.{i}"
        mixer: Attention | DeltaNet
        if config.kinds[i] == FULL_ATTENTION:
            mixer = self._attention(load, ctx, f"{prefix}.self_attn")
        else:
            mixer = load_delta_net(
                load, ctx, f"{prefix}.linear_attn", i, config.delta, config.split, config.rms_norm_eps
            )
        build = self._sparse if config.sparse[i] else load_mlp
        mlp = build(load, ctx, f"{prefix}.mlp")
        return PreNormLayer(config.rms_norm_eps, load_norms(load, ctx, prefix, 1.0), mixer, mlp)

    def _attention(self, load: Loader, ctx: ml.Context, prefix: str) -> Attention:
        """The queries' projection holds each head's query and gate by turns; the gates go last."""
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
        norm = qk_norm(load, ctx, prefix, config, 1.0)
        qkv = load.joined(ctx, weights, biases)
        return load_attention(load, ctx, prefix, config, qkv=qkv, qk_norm=norm, gated=True)

    def _sparse(self, load: Loader, ctx: ml.Context, prefix: str) -> SparseMLP:
        return SparseMLP(
            load.linear(ctx, f"{prefix}.gate"),
            load_each_expert(load, ctx, f"{prefix}.experts", self.config.experts),
            self.config.experts_per_token,
            "normalized" if self.config.normalize else "softmax",
            load_mlp(load, ctx, f"{prefix}.shared_expert"),
            load.linear(ctx, f"{prefix}.shared_expert_gate"),
        )
