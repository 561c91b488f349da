"""Which cache each layer of a transformers config needs, and the caches themselves."""

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
"""The ``attn_implementation`` of models that attend by our caches."""
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
    """What modules of some types do that a cache has to know of: the value says it.

    Each was found, and is held, by ``python -m benchmarks.census transformers``.
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
    """Whether a layer has something of every token."""
    return kind.attends or kind.name in STATES


@dataclass(frozen=True, slots=True)
class Compression:
    """What a layer stores one entry for each ``rate`` tokens of, by its names."""

    rate: int
    names: tuple[str, ...]

    @property
    def reach(self) -> int:
        """How many tokens of inputs the next entry may need: with an indexer, entries overlap by a window."""
        return self.rate * len(self.names)


@dataclass(frozen=True, slots=True)
class Plan:
    """The kind of every layer of a decoder, and whether an encoder stands beside it."""

    layers: tuple[Kind, ...]
    states: tuple[int, ...] = ()
    """How many convolutions and recurrences each layer has states of, beside K and V or alone."""
    indexed: frozenset[int] = frozenset()
    """Layers whose tokens may have keys of an indexer too, beside K and V."""
    compressed: Mapping[int, Compression] = field(default_factory=dict, hash=False)
    """By layer, what it stores entries of beside K and V."""
    encoder: bool = False
    conv_shape: tuple[int, ...] = ()
    state_shape: tuple[int, ...] = ()
    """Of one sequence's states, where the config tells; else those that a layer brings first."""
    grouped: bool = False
    """Whether several heads of queries share one of keys and values."""
    model_type: str = ""
    traits: frozenset[Trait] = frozenset()
    config: Any = field(default=None, compare=False, repr=False)
    """Where the model looks up which attention to call, at each call."""

    @property
    def attends(self) -> bool:
        """Whether attention is ours too, and reads the cache itself."""
        return getattr(self.config, "_attn_implementation", None) == ATTENTION

    def refuse(self, op: str, trait: Trait, remedy: str) -> None:
        """Raise NotSupportedError for a model with this trait."""
        if trait in self.traits:
            raise NotSupportedError(f"{op}: {self.model_type} {trait.value}; {remedy}")

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The different kinds of attention to the tokens before, in the order of their first layer."""
        entries = [Kind(COMPRESSED, compression.rate) for compression in self.compressed.values()]
        return tuple(dict.fromkeys([*(kind for kind in self.held.values() if kind.attends), *entries]))

    @property
    def held(self) -> dict[int, Kind]:
        """What each number stores of single tokens: the layers, and behind them the inputs of entries."""
        inputs = {
            self.parts(layer, i)[0]: Kind(SLIDING, compression.reach)
            for layer, compression in self.compressed.items()
            for i in range(len(compression.names))
        }
        return dict(enumerate(self.layers)) | inputs

    @property
    def numbers(self) -> int:
        """How many numbers rows keep account by: layers, and what they store beside K and V."""
        return len(self.layers) * (5 if self.compressed else 2)

    def parts(self, layer: int, i: int) -> tuple[int, int]:
        """By which numbers the inputs and the entries of a layer's compressor ``i`` are stored."""
        inputs = layer + len(self.layers) * (1 + 2 * i)
        return inputs, inputs + len(self.layers)

    @property
    def crossing(self) -> range | tuple[int, ...]:
        """The layers that read an encoder's output: all where one stands beside, else those of images."""
        found = tuple(i for i, kind in enumerate(self.layers) if kind.name == CROSS)
        return found if found or not self.encoder else range(len(self.layers))

    @property
    def is_hybrid(self) -> bool:
        return any(self.states)

    def part(self, layer: int) -> int:
        """By which number rows keep account of a layer's states, and store the keys of its indexer.

        Where it has K and V too, one of its own, behind all layers: no layer has states and an indexer.
        """
        return layer + len(self.layers) * self.layers[layer].attends


def layer_plan(config: Any) -> Plan:
    """The plan of a model's decoder. NotSupportedError for layers that none of our caches serves."""
    if not hasattr(config, "get_text_config"):
        raise InvalidRangeError(
            f"HFCache: config is a {type(config).__name__}; it must be the config of a model: model.config"
        )
    decoder = config.get_text_config(decoder=True)
    traits = frozenset(trait for trait, types in _TRAITS.items() if decoder.model_type in types.split())
    found = Plan((), model_type=decoder.model_type, traits=traits)
    for trait in (Trait.NO_CACHE, Trait.ANEW):
        found.refuse("HFCache", trait, "use it without one")
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
    # Decoding that leaves a model early says so in the count of layers alone, and the types are more.
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
    # Models of more than text and those of others may not know what to do with a mask that is made before;
    # transformers 5.19 cannot make those of chunks, and Moshi's own mask is not the one that its config says.
    known = decoder is config and type(config).__module__.startswith("transformers.models.")
    # Nor does it make those of windows beside states as it should.
    known = known and "hybrid_sliding" not in types
    plain = known and Trait.UNEVEN not in traits and all(kind.name != CHUNKED for kind in layers)
    grouped = plain and _is_grouped(decoder)
    asked = config if config.is_encoder_decoder else decoder  # of encoder-decoders it may be a copy
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


def _is_grouped(config: Any) -> bool:
    heads = vars(config).get("num_attention_heads")
    shared = vars(config).get("num_key_value_heads")
    return isinstance(heads, int) and isinstance(shared, int) and shared < heads


def _decoder_layers(config: Any, count: int) -> int:
    """How many layers a decoder has, whose config may count its encoder's in ``num_hidden_layers``."""
    # get_text_config() moves some names to others: what getattr() finds then is the class's default.
    told = vars(config)
    return int(told.get("decoder_layers") or told.get("num_decoder_layers") or count)
