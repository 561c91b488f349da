"""Llama 4, text only, written once on ml.nn: chunked layers with rope, full layers without.

transformers' modeling_llama4.py. Chunked layers rotate neighbouring dimensions, then normalise queries
and keys per head (norms without weights: a rotation keeps the length). The other layers know no
positions; their queries grow with the position (Nakanishi, "Scalable-Softmax", arXiv 2501.19399)::

    1 + scale * log(1 + floor((position + 1) / floor_scale))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import ml
from kvcache import CausalCache, ChunkedCache, WrapperCache
from kvcache.cache import Batch, Cache
from kvcache_engine.config import ModelConfig, common_fields, experts_per_token, refuse
from kvcache_engine.models.attention import Attention, load_attention
from kvcache_engine.models.decoder import CausalModel
from kvcache_engine.models.feedforward import GatedMLP, SparseMLP, load_experts, load_mlp, mlp_shapes
from kvcache_engine.models.layer_types import FULL_ATTENTION, layer_types
from kvcache_engine.models.step import ROPE, Step
from kvcache_engine.weights import Loader, Shape
from ml import nn
from ml.nn import parse_rope

__all__ = ["Llama4", "Llama4Config", "make_cache", "parse"]

_CHUNKED_ATTENTION = "chunked_attention"
_CHUNKED, _FULL = 0, 1
_TEMPERATURE = "temperature"


@dataclass(frozen=True, slots=True)
class Llama4Config(ModelConfig):
    """``rotated[i]`` says whether layer i has rope; ``sparse[i]`` whether it has experts, which are of
    ``intermediate_size``, or an MLP of ``dense_size``. ``temperature`` is (scale, floor_scale).
    """

    kinds: tuple[str, ...]
    chunk: int
    rotated: tuple[bool, ...]
    plain_norm: bool
    sparse: tuple[bool, ...]
    dense_size: int
    experts: int
    experts_per_token: int
    temperature: tuple[float, float] | None

    def cache_kind(self, i: int) -> int:
        return _CHUNKED if self.kinds[i] == _CHUNKED_ATTENTION else _FULL


def parse(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> Llama4Config:
    refuse(raw, {"hidden_act": ["silu", "swish"]})
    fields = common_fields(raw, generation, "Llama4ForCausalLM")
    count = raw["num_hidden_layers"]
    interval = raw["no_rope_layer_interval"]
    rotated = raw.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(count)]
    types = _CHUNKED_ATTENTION, FULL_ATTENTION
    kinds = layer_types(raw, types, lambda i: types[not rotated[i]])
    step = raw["interleave_moe_layer_step"]
    sparse = raw.get("moe_layers")
    if sparse is None:
        sparse = range(step - 1, count, step)
    temperature = float(raw["attn_scale"]), float(raw["floor_scale"])
    rope = parse_rope(raw, fields["head_dim"])
    return Llama4Config(
        **fields,
        rope=replace(rope, interleaved=True),
        kinds=kinds,
        chunk=int(raw["attention_chunk_size"] or fields["max_positions"]),
        rotated=tuple(map(bool, rotated)),
        plain_norm=bool(raw["use_qk_norm"]),
        sparse=tuple(i in sparse for i in range(count)),
        dense_size=raw["intermediate_size_mlp"],
        experts=raw["num_local_experts"],
        experts_per_token=experts_per_token(raw, raw["num_local_experts"]),
        temperature=temperature if raw["attn_temperature_tuning"] else None,
    )


def make_cache(config: Llama4Config, dtype: ml.DType | None = None) -> WrapperCache:
    """For the two types of layers: type 0 is chunked, type 1 full; any ``dtype`` alike.

    When tokens are removed from the middle, keys without positions stay what they are.
    """
    turn = nn.rope_shift(config.rope)

    def shift(ctx: ml.Context, layer: int, key: ml.Tensor, offsets: ml.Tensor) -> ml.Tensor:
        return turn(ctx, layer, key, offsets) if config.rotated[layer] else key

    return WrapperCache(ChunkedCache(config.chunk, shift), CausalCache(shift))


class Llama4(CausalModel[Llama4Config]):
    cache_type = WrapperCache
    cache_of = staticmethod(make_cache)

    def begin_pass(self, ctx: ml.Context, batch: Batch, cache: Cache) -> Step:
        step = super().begin_pass(ctx, batch, cache)
        if self.config.temperature is not None:
            scale, floor = self.config.temperature
            positions = np.asarray(batch.positions, np.float32)
            grown = 1 + scale * np.log1p(np.floor((positions + 1) / floor))
            step.tensors[_TEMPERATURE] = ctx.from_numpy(grown[:, None, None], self.dtype)
        return step

    @classmethod
    def mlp_shapes(cls, config: Any, i: int) -> dict[str, Shape]:
        hidden, inner, experts = config.hidden_size, config.intermediate_size, config.experts
        if not config.sparse[i]:
            return mlp_shapes("feed_forward", hidden, config.dense_size)
        return mlp_shapes("feed_forward.shared_expert", hidden, inner) | {
            "feed_forward.router.weight": (experts, hidden),
            "feed_forward.experts.gate_up_proj": (experts, hidden, 2 * inner),
            "feed_forward.experts.down_proj": (experts, inner, hidden),
        }

    def mixer(self, load: Loader, ctx: ml.Context, prefix: str, i: int) -> Attention:
        config, rotated = self.config, self.config.rotated[i]
        return load_attention(
            load,
            ctx,
            f"{prefix}.self_attn",
            config,
            plain_norm=config.plain_norm and rotated,
            rotation=ROPE if rotated else None,
            temperature=None if rotated else _TEMPERATURE,
        )

    def mlp(self, load: Loader, ctx: ml.Context, prefix: str, i: int) -> GatedMLP | SparseMLP:
        prefix = f"{prefix}.feed_forward"
        if not self.config.sparse[i]:
            return load_mlp(load, ctx, prefix)
        return SparseMLP(
            load.linear(ctx, f"{prefix}.router"),
            load_experts(load, ctx, f"{prefix}.experts"),
            self.config.experts_per_token,
            "sigmoid of top",
            load_mlp(load, ctx, f"{prefix}.shared_expert"),
        )
