"""Which cache each layer of a transformers config needs, and the caches themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import cache_utils
from transformers.cache_utils import get_layer_types_and_kwargs

import ml
from kvcache import (
    CausalCache,
    ChunkedCache,
    EncoderCache,
    NotSupportedError,
    RecurrentCache,
    ShiftFunction,
    SlidingWindowCache,
    WrapperCache,
)

__all__ = ["Attending", "Family", "Kind", "Plan", "empty_layer", "layer_plan"]

FULL, SLIDING, CHUNKED, LINEAR, NONE = "full", "sliding", "chunked", "linear", "none"
_TYPES = {
    "full_attention": FULL,
    "sliding_attention": SLIDING,
    "chunked_attention": CHUNKED,
    "linear_attention": LINEAR,
    "conv": LINEAR,
    "dummy": NONE,
}

Attending = CausalCache
"""The caches whose layers have K and V."""

Top = Attending | RecurrentCache | EncoderCache
"""What a wrapper wraps here."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a layer keeps. ``size`` is how many tokens a query sees at most, itself included; 0: all.

    transformers' ``sliding_window`` and ``attention_chunk_size`` both count so.
    """

    name: str
    size: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """The kind of every layer of a decoder, and whether an encoder stands beside it."""

    layers: tuple[Kind, ...]
    encoder: bool = False
    conv_shape: tuple[int, ...] = ()
    state_shape: tuple[int, ...] = ()
    """Of one sequence's states, where the config tells; else those that a layer brings first."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The different kinds that keep something, in the order of their first layer."""
        return tuple(dict.fromkeys(kind for kind in self.layers if kind.name != NONE))

    @property
    def is_hybrid(self) -> bool:
        return any(kind.name == LINEAR for kind in self.layers)


def layer_plan(config: Any) -> Plan:
    """The plan of a model's decoder. NotSupportedError for layers that none of our caches serves."""
    decoder = config.get_text_config(decoder=True)
    types, arguments = get_layer_types_and_kwargs(decoder)
    layers = []
    # Decoding that leaves a model early says so in the count of layers alone, and the types are more.
    for i, (layer_type, options) in enumerate(zip(types, arguments, strict=False)):
        name = _TYPES.get(layer_type)
        if name is None or options.get("number_of_states", 1) != 1:
            raise NotSupportedError(
                f"HFCache: layer {i} of {decoder.model_type} is {layer_type!r} {options}; "
                f"supported are {', '.join(_TYPES)}, with one state each: use transformers' own cache"
            )
        layers.append(Kind(name, options.get("sliding_window", 0)))
    count = _decoder_layers(decoder, len(layers))
    return Plan(tuple(layers[:count]), config.is_encoder_decoder, *_state_shapes(decoder))


def empty_layer() -> Any:
    """transformers' layer that keeps nothing. It came with 5.23, as did the configs that name such layers."""
    return cache_utils.DummyLayer()


def _state_shapes(config: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of convolution and recurrent states of the gated delta rule; () for other kinds of linear attention."""
    if not hasattr(config, "linear_num_value_heads"):
        return (), ()
    heads, key_dim = config.linear_num_value_heads, config.linear_key_head_dim
    value_dim = config.linear_value_head_dim
    channels = 2 * config.linear_num_key_heads * key_dim + heads * value_dim
    return (channels, config.linear_conv_kernel_dim), (heads, key_dim, value_dim)


def _decoder_layers(config: Any, count: int) -> int:
    """An encoder-decoder's ``num_hidden_layers`` counts the encoder's."""
    if not config.is_encoder_decoder:
        return count
    for name in ("decoder_layers", "num_decoder_layers"):
        if getattr(config, name, None):
            return int(getattr(config, name))
    return count


class Family:
    """The caches of one model, bound to a backend, and all of them behind one interface.

    Windows keep ``lookback`` tokens more than they show, so that many may be taken back.
    """

    def __init__(self, plan: Plan, lookback: int, shift: ShiftFunction | None, activations: ml.DType) -> None:
        self.recurrent: RecurrentCache | None = None
        self.caches: dict[Kind, Attending] = {}
        """Where each kind of attention layer is kept."""
        tops: list[Top] = []
        if plan.is_hybrid:
            self.recurrent = RecurrentCache(plan.conv_shape, plan.state_shape, shift, conv_dtype=activations)
            tops.append(self.recurrent)
        for kind in plan.kinds:
            if kind.name == LINEAR:
                continue
            if kind.name == FULL and self.recurrent is not None:
                self.caches[kind] = self.recurrent.attention
                continue
            cache = _attention(kind, lookback, shift)
            self.caches[kind] = cache
            tops.append(cache)
        self.encoder = EncoderCache() if plan.encoder else None
        """The cache of cross attention."""
        if self.encoder is not None:
            tops.append(self.encoder)
        self.tops: Sequence[Top] = tops
        self.all: Top | WrapperCache = tops[0] if len(tops) == 1 else WrapperCache(*tops)

    @property
    def cross(self) -> EncoderCache:
        assert self.encoder is not None
        return self.encoder

    def kept(self, kind: Kind) -> int | None:
        """How many tokens of a sequence the cache of a kind keeps; None: all."""
        cache = self.caches[kind]
        if not isinstance(cache, SlidingWindowCache) or cache._unlimited:
            return None
        return max(1, cache._kept)

    def init(self, backend: ml.Backend, dtype: ml.DType, max_sequences: int, capacity: int) -> None:
        for cache in self.tops:
            cache.init(backend, dtype, max_sequences, capacity, _max_batch(cache, max_sequences))


def _attention(kind: Kind, lookback: int, shift: ShiftFunction | None) -> Attending:
    if kind.name == SLIDING:
        return SlidingWindowCache(kind.size - 1, kind.size - 1 + lookback, shift)
    return ChunkedCache(kind.size, shift) if kind.name == CHUNKED else CausalCache(shift)


def _max_batch(cache: Top, max_sequences: int) -> int:
    """Room for as many new tokens as a window keeps; of a longer batch only so many are stored."""
    if not isinstance(cache, SlidingWindowCache):
        return max_sequences
    return max_sequences * (max(cache.memory, cache.window + 1))
