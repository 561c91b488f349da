"""Whisper's decoder, written once on ml.nn: causal self-attention and cross attention to the encoder.

Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision", 2022 (arXiv 2212.04356);
transformers' modeling_whisper.py. Positions are learned, norms have biases, keys have none::

    hidden += attend(norm(hidden));    hidden += attend(norm(hidden), encoder);    hidden += mlp(norm(hidden))

The encoder's output is passed in ``batch.multimodal`` as pairs of (batch index, states (frames, hidden_size),
an array or a Tensor), with a token of its sequence: once, usually with the first token. Its keys and values
then stay in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import ml
from kvcache import CausalCache, EncoderCache, WrapperCache
from kvcache.cache import Batch, Cache
from kvcache_engine.config import read_token_ids, refuse, refuse_quantized
from kvcache_engine.errors import RequestError
from kvcache_engine.models.attention import Attention, merge_heads
from kvcache_engine.models.decoder import CausalModel, Names
from kvcache_engine.models.defaults import filled
from kvcache_engine.models.step import Layer, Step
from kvcache_engine.weights import Linear, Loader, Shape
from ml import nn

__all__ = ["Whisper", "WhisperConfig", "make_cache", "parse"]

_CROSS, _SELF = 0, 1
_STATES, _LENGTHS = "encoder states", "encoder lengths"
_EPS = 1e-5
_POSITIONS = "model.decoder.embed_positions"
NAMES = Names("model.decoder.embed_tokens", "model.decoder.layers", "model.decoder.layer_norm", "proj_out")


@dataclass(frozen=True, slots=True)
class WhisperConfig:
    """The decoder's part of a Whisper model; names as in ModelConfig."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    max_positions: int
    tie_embeddings: bool
    start_id: int | None
    eos_ids: tuple[int, ...]

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads


def parse(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> WhisperConfig:
    refuse_quantized(raw)
    refuse(raw, {"activation_function": ["gelu"]})
    raw = filled(raw, generation, "WhisperForConditionalGeneration")
    eos = read_token_ids(raw["eos_token_id"]) + read_token_ids(generation.get("eos_token_id"))
    return WhisperConfig(
        architecture="WhisperForConditionalGeneration",
        vocab_size=raw["vocab_size"],
        hidden_size=raw["d_model"],
        intermediate_size=raw["decoder_ffn_dim"],
        layers=raw["decoder_layers"],
        heads=raw["decoder_attention_heads"],
        max_positions=raw["max_target_positions"],
        tie_embeddings=bool(raw["tie_word_embeddings"]),
        start_id=raw["decoder_start_token_id"],
        eos_ids=tuple(dict.fromkeys(eos)),
    )


def make_cache(config: WhisperConfig, dtype: ml.DType | None = None) -> WrapperCache:
    """A cache whose type 0 stores the encoder's output, and type 1 the decoder's own keys. Their positions
    are learned, so nothing can be removed from the middle. For any ``dtype``.
    """
    return WrapperCache(EncoderCache(), CausalCache())


class Whisper(CausalModel):
    cache_type = WrapperCache
    cache_of = staticmethod(make_cache)
    names = NAMES

    @classmethod
    def shapes(cls, config: Any) -> dict[str, Shape]:
        hidden = config.hidden_size
        positions: dict[str, Shape] = {f"{_POSITIONS}.weight": (config.max_positions, hidden)}
        return super().shapes(config) | positions | {f"{NAMES.norm}.bias": (hidden,)}

    @classmethod
    def layer_shapes(cls, config: Any, i: int) -> dict[str, Shape]:
        hidden, inner = config.hidden_size, config.intermediate_size
        shapes: dict[str, Shape] = {
            "fc1.weight": (inner, hidden),
            "fc1.bias": (inner,),
            "fc2.weight": (hidden, inner),
            "fc2.bias": (hidden,),
        }
        for norm in ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"):
            shapes |= {f"{norm}.weight": (hidden,), f"{norm}.bias": (hidden,)}
        for attention in ("self_attn", "encoder_attn"):
            for name in ("q", "k", "v", "out"):
                shapes[f"{attention}.{name}_proj.weight"] = (hidden, hidden)
                if name != "k":
                    shapes[f"{attention}.{name}_proj.bias"] = (hidden,)
        return shapes

    def _load_more(self, load: Loader, ctx: ml.Context) -> None:
        self._positions = load.tensor(ctx, f"{_POSITIONS}.weight")
        self._last_norm = _Norm(self._norm, load.tensor(ctx, f"{NAMES.norm}.bias"))

    def _layer(self, load: Loader, ctx: ml.Context, i: int) -> Layer:
        prefix = f"{NAMES.layers}.{i}"
        own, cross = f"{prefix}.self_attn", f"{prefix}.encoder_attn"
        heads, dim = self.config.heads, self.config.head_dim
        return _Layer(
            _load_norm(load, ctx, f"{own}_layer_norm"),
            Attention(
                load.linear(ctx, *(f"{own}.{name}_proj" for name in "qkv")),
                load.linear(ctx, f"{own}.out_proj"),
                heads,
                heads,
                dim,
                dim**-0.5,
                rotation=None,
            ),
            _load_norm(load, ctx, f"{cross}_layer_norm"),
            _CrossAttention(
                load.linear(ctx, f"{cross}.q_proj"),
                load.linear(ctx, f"{cross}.k_proj", f"{cross}.v_proj"),
                load.linear(ctx, f"{cross}.out_proj"),
                heads,
                dim,
            ),
            _load_norm(load, ctx, f"{prefix}.final_layer_norm"),
            load.linear(ctx, f"{prefix}.fc1"),
            load.linear(ctx, f"{prefix}.fc2"),
        )

    def embed(self, ctx: ml.Context, batch: Batch) -> ml.Tensor:
        return super().embed(ctx, batch).add(ctx, self._positions.rows(ctx, np.asarray(batch.positions)))

    def begin_pass(self, ctx: ml.Context, batch: Batch, cache: Cache) -> Step:
        step = Step(batch, cache)
        items = [
            item.to_numpy() if isinstance(item, ml.Tensor) else np.asarray(item)
            for item in _items(batch).values()
        ]
        for item in items:
            if item.ndim != 2 or item.shape[1] != self.config.hidden_size:
                raise RequestError(
                    f"forward: encoder states {item.shape}; they must be (frames, {self.config.hidden_size})"
                )
        if items:
            step.plans[_LENGTHS] = [len(item) for item in items]
            step.tensors[_STATES] = ctx.from_numpy(np.concatenate(items), self.dtype)
        return step

    def logits(self, ctx: ml.Context, hidden: ml.Tensor) -> ml.Tensor:
        return self._head(ctx, self._last_norm(ctx, hidden))


def _items(batch: Batch) -> dict[int, Any]:
    """The encoder states of the sequences that have some in the batch, in the order that EncoderCache
    expects.
    """
    return {int(batch.sequences[index]): item for index, item in batch.multimodal}


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: ml.Tensor
    bias: ml.Tensor

    def __call__(self, ctx: ml.Context, x: ml.Tensor) -> ml.Tensor:
        return nn.layer_norm(ctx, x, self.weight, self.bias, _EPS)


@dataclass(frozen=True, slots=True)
class _CrossAttention:
    query: Linear
    key_value: Linear
    output: Linear
    heads: int
    head_dim: int

    def __call__(self, ctx: ml.Context, x: ml.Tensor, step: Step) -> ml.Tensor:
        """x (tokens, hidden_size) -> the same shape; encoder states in the batch are stored first."""
        states, heads = step.tensors.get(_STATES), self.heads
        if states is not None:
            both = self.key_value(ctx, states).reshape(ctx, states.shape[0], 2 * heads, self.head_dim)
            key, value = both.slice(ctx, 1, 0, heads), both.slice(ctx, 1, heads, 2 * heads)
            step.cache.current.put(ctx, key, value, step.plans[_LENGTHS])
        query = self.query(ctx, x).reshape(ctx, x.shape[0], heads, self.head_dim)
        return self.output(ctx, merge_heads(ctx, step.cache.attend(ctx, query, self.head_dim**-0.5)))


@dataclass(frozen=True, slots=True)
class _Layer:
    norm: _Norm
    attention: Attention
    cross_norm: _Norm
    cross: _CrossAttention
    mlp_norm: _Norm
    widen: Linear
    narrow: Linear

    def mix(self, ctx: ml.Context, hidden: ml.Tensor, step: Step) -> ml.Tensor:
        step.cache.set_layer_type(_SELF)
        hidden = hidden.add(ctx, self.attention(ctx, self.norm(ctx, hidden), step))
        step.cache.set_layer_type(_CROSS)
        return hidden.add(ctx, self.cross(ctx, self.cross_norm(ctx, hidden), step))

    def feed(self, ctx: ml.Context, hidden: ml.Tensor) -> ml.Tensor:
        inner = self.widen(ctx, self.mlp_norm(ctx, hidden)).gelu(ctx)
        return hidden.add(ctx, self.narrow(ctx, inner))


def _load_norm(load: Loader, ctx: ml.Context, name: str) -> _Norm:
    return _Norm(load.tensor(ctx, f"{name}.weight"), load.tensor(ctx, f"{name}.bias"))
