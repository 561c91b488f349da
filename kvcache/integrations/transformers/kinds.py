"""Determines the cache that each layer of a transformers config needs, and creates the caches."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import cache_utils
from transformers.cache_utils import get_layer_types_and_kwargs

from kvcache import InvalidRangeError, NotSupportedError
from kvcache.integrations.rows.caches import CHUNKED, COMPRESSED, FULL, SLIDING, Kind

__all__ = [
    "ATTENTION",
    "CONV",
    "CROSS",
    "STATES",
    "Compression",
    "Kind",
    "Plan",
    "Trait",
    "empty_layer",
    "grows",
    "layer_plan",
]

CROSS, LINEAR, CONV, NONE = "cross", "linear", "conv", "none"
STATES = (LINEAR, CONV)
ATTENTION = "kvcache"
"""The ``attn_implementation`` with which our caches compute attention."""
_TYPES = {
    "full_attention": FULL,
    "indexed_attention": FULL,
    "sliding_attention": SLIDING,
    "chunked_attention": CHUNKED,
    "linear_attention": LINEAR,
    "conv": CONV,
    "dummy": NONE,
    "hybrid": FULL,
    "hybrid_sliding": SLIDING,
    "compressed_sparse_attention": SLIDING,
    "heavily_compressed_attention": SLIDING,
}
_INDEXED = "indexed_attention"
_COMPRESSORS = {
    "compressed_sparse_attention": ("compressor", "indexer"),
    "heavily_compressed_attention": ("compressor",),
}
_STATEFUL = ("linear_attention", "conv", "hybrid", "hybrid_sliding")


class Trait(enum.Enum):
    """A peculiarity of some model types that a cache must know of; the value describes it. Each was found,
    and is checked, by ``python -m benchmarks.census transformers``.
    """

    NO_CACHE = "takes no cache of keys and values"
    ANEW = "divides a text anew at each step, and gives other tokens with any cache than without one"
    BY_ONE = "continues correctly from a state by one token at a time only"
    INSIDE = "keeps the states of its linear layers in its own modules"
    UNEVEN = "gives other results if a prompt is evaluated in parts"
    OWN_MASK = "builds masks of its own that are wrong for keys of a fixed length"
    WHOLE = "gives states instead of inputs, and the number of tokens with K and V alone"
    COMPRESSED = "stores entries that stand for several tokens each"
    OWN_CLASS = "accepts caches of a class of its own only"
    CONTIGUOUS = "calls view() on the keys, which must lie in one piece for that"


_TRAITS = {
    Trait.NO_CACHE: "openai-gpt reformer rwkv xlnet xlstm xlm",
    Trait.ANEW: "blt",
    Trait.BY_ONE: "falcon_mamba jamba mamba prophetnet recurrent_gemma zamba",
    Trait.INSIDE: "recurrent_gemma",
    Trait.UNEVEN: "cpmant doge moshi",
    Trait.OWN_MASK: "cpmant gpt_neo inkling_text inkling2_text inkling2_loop_text prophetnet",
    Trait.WHOLE: "minimax zaya",
    Trait.COMPRESSED: "deepseek_v4",
    Trait.OWN_CLASS: "minimax",
    Trait.CONTIGUOUS: "gpt_neox_japanese",
}


def grows(kind: Kind) -> bool:
    """Whether a layer stores something for every token."""
    return kind.attends or kind.name in STATES


@dataclass(frozen=True, slots=True)
class Compression:
    """A compressor of a layer, by name, which stores one entry for each ``rate`` tokens."""

    rate: int
    names: tuple[str, ...]

    @property
    def reach(self) -> int:
        """The number of input tokens that the next entry may need; with an indexer, entries overlap by a
        window.
        """
        return self.rate * len(self.names)


@dataclass(frozen=True, slots=True)
class Plan:
    """The kind of every layer of a decoder, and whether it has an encoder."""

    layers: tuple[Kind, ...]
    states: tuple[int, ...] = ()
    """By layer, the number of convolutions and recurrences with states, with or without K and V."""
    indexed: frozenset[int] = frozenset()
    """Layers whose tokens may also have keys of an indexer."""
    compressed: Mapping[int, Compression] = field(default_factory=dict, hash=False)
    """By layer, the compressors that store entries besides K and V."""
    encoder: bool = False
    conv_shape: tuple[int, ...] = ()
    state_shape: tuple[int, ...] = ()
    """The shape of one sequence's states, if the config gives it; else that of the first states stored."""
    grouped: bool = False
    """Whether several query heads share a KV head."""
    model_type: str = ""
    traits: frozenset[Trait] = frozenset()
    config: Any = field(default=None, compare=False, repr=False)
    """The config in which the model looks up its attention implementation at each call."""

    @property
    def attends(self) -> bool:
        """Whether our caches compute attention."""
        return getattr(self.config, "_attn_implementation", None) == ATTENTION

    def refuse(self, op: str, trait: Trait, remedy: str) -> None:
        """Raise NotSupportedError for a model with this trait."""
        if trait in self.traits:
            raise NotSupportedError(f"{op}: {self.model_type} {trait.value}; {remedy}")

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of attention to earlier tokens, in the order of their first layer."""
        entries = [Kind(COMPRESSED, compression.rate) for compression in self.compressed.values()]
        return tuple(dict.fromkeys([*(kind for kind in self.held.values() if kind.attends), *entries]))

    @property
    def held(self) -> dict[int, Kind]:
        """By number, the kind of what is stored for each token: the layers, then the inputs of entries."""
        inputs = {
            self.parts(layer, i)[0]: Kind(SLIDING, compression.reach)
            for layer, compression in self.compressed.items()
            for i in range(len(compression.names))
        }
        return dict(enumerate(self.layers)) | inputs

    @property
    def numbers(self) -> int:
        """The number of indices by which rows count: layers, then what layers store besides K and V."""
        return len(self.layers) * (5 if self.compressed else 2)

    def parts(self, layer: int, i: int) -> tuple[int, int]:
        """The indices under which the inputs and the entries of a layer's compressor ``i`` are stored."""
        inputs = layer + len(self.layers) * (1 + 2 * i)
        return inputs, inputs + len(self.layers)

    @property
    def crossing(self) -> range | tuple[int, ...]:
        """The layers that read an encoder's output: all if the model has an encoder, else those for
        images.
        """
        crossing = tuple(i for i, kind in enumerate(self.layers) if kind.name == CROSS)
        return crossing if crossing or not self.encoder else range(len(self.layers))

    @property
    def is_hybrid(self) -> bool:
        return any(self.states)

    def part(self, layer: int) -> int:
        """The index under which rows count a layer's states, or store the keys of its indexer. If the layer
        has K and V too, it is a separate index after all layers; no layer has both states and an indexer.
        """
        return layer + len(self.layers) * self.layers[layer].attends


def layer_plan(config: Any) -> Plan:
    """The plan of a model's decoder. Raises NotSupportedError for unsupported layers."""
    if not hasattr(config, "get_text_config"):
        raise InvalidRangeError(
            f"HFCache: config is a {type(config).__name__}; it must be the config of a model: model.config"
        )
    decoder = config.get_text_config(decoder=True)
    traits = frozenset(trait for trait, types in _TRAITS.items() if decoder.model_type in types.split())
    plan = Plan((), model_type=decoder.model_type, traits=traits)
    for trait in (Trait.NO_CACHE, Trait.ANEW):
        plan.refuse("HFCache", trait, "use it without one")
    try:
        types, arguments = get_layer_types_and_kwargs(decoder)
    except AttributeError as error:
        raise NotSupportedError(
            f"HFCache: the config of {decoder.model_type} does not say what each layer stores ({error})"
        ) from error
    if not types:
        raise NotSupportedError(f"HFCache: the config of {decoder.model_type} lists no layers")
    layers: list[Kind] = []
    counts: list[int] = []
    # With early exit, only the count of layers is reduced, and there are more types.
    for i, (layer_type, options) in enumerate(zip(types, arguments, strict=False)):
        if layer_type not in _TYPES:
            raise NotSupportedError(
                f"HFCache: layer {i} of {decoder.model_type} is {layer_type!r}; "
                f"supported are {', '.join(_TYPES)}: use transformers' own cache"
            )
        window = decoder.sliding_window if layer_type in _COMPRESSORS else 0
        layers.append(Kind(_TYPES[layer_type], options.get("sliding_window", window)))
        counts.append(options.get("number_of_states", 1) if layer_type in _STATEFUL else 0)
    count = _decoder_layers(decoder, len(layers))
    missing = count - len(layers)
    layers, counts = layers[:count] + layers[-1:] * missing, counts[:count] + counts[-1:] * missing
    crossed = getattr(decoder, "cross_attention_layers", None) or ()
    layers = [Kind(CROSS) if i in crossed else kind for i, kind in enumerate(layers)]
    encoder = config.is_encoder_decoder or Kind(CROSS) in layers
    # Multimodal and third-party models may not accept a deferred mask; transformers 5.19 cannot make masks of
    # chunks, and Moshi's own mask differs from its config.
    known = decoder is config and type(config).__module__.startswith("transformers.models.")
    # It also makes incorrect masks for windows combined with states.
    known = known and "hybrid_sliding" not in types
    plain = known and Trait.UNEVEN not in traits and all(kind.name != CHUNKED for kind in layers)
    grouped = plain and _is_grouped(decoder)
    asked = config if config.is_encoder_decoder else decoder  # for encoder-decoders it may be a copy
    return Plan(
        tuple(layers),
        tuple(counts),
        frozenset(i for i, layer_type in enumerate(types[:count]) if layer_type == _INDEXED),
        {
            i: Compression(decoder.compress_rates[layer_type], _COMPRESSORS[layer_type])
            for i, layer_type in enumerate(types[:count])
            if layer_type in _COMPRESSORS
        },
        encoder,
        *_state_shapes(decoder),
        grouped,
        decoder.model_type,
        traits,
        asked,
    )


def empty_layer() -> Any:
    """transformers' layer that stores nothing. It was added in 5.23, as were configs with such layers."""
    return cache_utils.DummyLayer()


def _state_shapes(config: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the gated delta rule's convolution and recurrent states; () for other linear
    attention.
    """
    if not hasattr(config, "linear_num_value_heads"):
        return (), ()
    heads, key_dim = config.linear_num_value_heads, config.linear_key_head_dim
    value_dim = config.linear_value_head_dim
    channels = 2 * config.linear_num_key_heads * key_dim + heads * value_dim
    return (channels, config.linear_conv_kernel_dim), (heads, key_dim, value_dim)


def _is_grouped(config: Any) -> bool:
    heads = vars(config).get("num_attention_heads")
    shared = vars(config).get("num_key_value_heads")
    return isinstance(heads, int) and isinstance(shared, int) and shared < heads


def _decoder_layers(config: Any, count: int) -> int:
    """The number of a decoder's layers; ``num_hidden_layers`` of its config may be the encoder's."""
    # get_text_config() renames some attributes; getattr() then returns the class's default.
    settings = vars(config)
    return int(settings.get("decoder_layers") or settings.get("num_decoder_layers") or count)
