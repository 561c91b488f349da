"""The layers of a cache in transformers' interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from kvcache import InvalidRangeError, NotSupportedError
from kvcache.integrations.transformers.kinds import CONV, Kind, Trait
from kvcache.integrations.transformers.masks import check_padding, check_positions, check_width, watch_masks
from kvcache.integrations.transformers.passes import Pair
from kvcache.integrations.transformers.rows import BatchRows, untraced
from kvcache.integrations.transformers.states import States, state_name

__all__ = [
    "AttentionLayer", "CrossCache", "CrossLayer", "Crossing", "HybridLayer", "LinearLayer", "RowsCache",
    "each_layer",
]  # fmt: skip


_INSIDE = {
    "begun", "bind", "check_mask", "detach", "layer_class_to_replicate", "of", "offloading", "rows", "stored",
}  # fmt: skip


class RowsCache(TransformersCache):  # type: ignore[misc]
    """A transformers cache over ``rows``, whose layers ``_attach`` makes."""

    rows: BatchRows

    @classmethod
    def of(cls, rows: BatchRows) -> Self:
        """A cache over existing rows."""
        cache = cls.__new__(cls)
        cls._attach(cache, rows)
        return cache

    def _attach(self, rows: Any) -> None:
        raise NotImplementedError

    def __dir__(self) -> list[str]:
        """The names that a user or a model calls."""
        return sorted(set(super().__dir__()) - _INSIDE)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Call the layer directly: these caches neither add nor offload layers."""
        if layer_idx >= len(self.layers):
            raise InvalidRangeError(
                f"update: layer {layer_idx}; this cache was made for a config of {len(self.layers)} layers, "
                "and the model has more: make one with its own config"
            )
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    @property
    def is_linear(self) -> list[bool]:
        """Which layers have only states: transformers makes masks for a layer with K and V. All False for a
        nonempty cache without other layers: if all were True, ``generate`` would assume that tokens are not
        counted, and pass those already in the states again.
        """
        own: Any = self if hasattr(self, "layers") else self.self_attention_cache  # an encoder-decoder
        linear = [
            isinstance(layer, LinearAttentionCacheLayerMixin) and not isinstance(layer, CacheLayerMixin)
            for layer in own.layers
        ]
        return [False] * len(linear) if all(linear) and self.rows.length else linear

    def check_mask(self, mask: torch.Tensor, tokens: int, recurrent: bool) -> None:
        """Refuse a mask (rows, tokens so far), for a pass of ``tokens``, that does not fit these rows.
        ``recurrent``: it is for layers with states.
        """
        if recurrent:
            plan = self.rows.pool.plan
            if any(kind.attends for kind in plan.layers):
                check_width(mask, self.stored, tokens)
            check_padding(plan.model_type, mask, tokens, self.begun)

    @property
    def stored(self) -> int:
        """The number of tokens with K and V in each row."""
        return self.rows.length

    def begun(self, mask: torch.Tensor, tokens: int) -> torch.Tensor:
        """By row, whether its states have a token, for a pass of ``tokens`` with this mask; BOOL (rows)."""
        stored = self.rows.length
        if mask.shape[1] != stored + tokens:  # says nothing of the earlier ones
            return mask.new_full((mask.shape[0],), stored > 0, dtype=torch.bool)
        return mask[:, :-tokens].any(1)

    @property
    def nbytes(self) -> int:
        """Bytes of all allocated memory, including forks."""
        pool = self.rows.pool
        return int(getattr(pool.family.all, "nbytes", 0)) if pool.bound else 0


watch_masks(RowsCache)


class _OurLayer:
    """Shared by all of our layers, including the queries of speculative decoding."""

    rows: BatchRows
    is_compileable = False
    is_sliding = False
    supports_early_init = False

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """A no-op: buffers are allocated by the first ``update``."""

    @property
    def record_past(self) -> bool:
        """Whether a crop removes the pass since the previous crop. The value is shared by all layers."""
        return self.rows.settled is not None

    @record_past.setter
    def record_past(self, on: bool) -> None:
        if on is not self.record_past:
            self.rows.record(on)

    def activate_past_recording(self) -> None:
        self.record_past = True


def _refusing(op: str) -> Callable[..., None]:
    def refuse(self: Any, *args: Any, **options: Any) -> None:
        """Raise NotSupportedError: all layers change together."""
        raise NotSupportedError(
            f"{op}: of layer {self.layer} alone; all layers change together: call {op} of the cache"
        )

    return refuse


for _op in (
    "reset", "crop", "reorder_cache", "batch_repeat_interleave", "batch_select_indices", "offload", "prefetch"
):  # fmt: skip
    setattr(_OurLayer, _op, _refusing(_op))


class _KeysAndValues:
    """A layer with K and V."""

    is_croppable = True

    @property
    def found(self) -> Pair | None:
        """Everything that later tokens may see, each (rows, heads, tokens, dim); None before the first
        token.
        """
        raise NotImplementedError

    @property
    def keys(self) -> torch.Tensor | None:
        return None if (pair := self.found) is None else pair[0]

    @property
    def values(self) -> torch.Tensor | None:
        return None if (pair := self.found) is None else pair[1]


_update_untraced = untraced(BatchRows.update)
"""Apart from ``update``, since the detour takes time at every token."""


class AttentionLayer(_OurLayer, _KeysAndValues, CacheLayerMixin):  # type: ignore[misc]
    """K and V of one layer, in its kind's cache."""

    def __init__(self, rows: BatchRows, layer: int, kind: Kind) -> None:
        self.rows, self.layer, self.kind = rows, layer, kind
        self.is_sliding = kind.size > 0

    @property
    def is_initialized(self) -> bool:
        return self.rows.seen[self.layer] > 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Pair:
        """Store K and V (rows, heads, new tokens, dim); returns everything that the new tokens may see."""
        rows = self.rows
        if rows.removed and rows.seen[self.layer] == rows.length:
            check_positions(kwargs.get("kwargs") or {}, rows.length, key_states.shape[2], rows.removed)
        if torch.compiler.is_compiling():
            return _update_untraced(rows, self.layer, self.kind, key_states, value_states)
        return rows.update(self.layer, self.kind, key_states, value_states, True)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys that ``update`` will return, position of the first one)."""
        seen = self.rows.seen[self.layer]
        first = max(0, seen - self.kind.size + 1) if self.kind.size else 0
        return seen - first + query_length, first

    def get_seq_length(self) -> int:
        return self.rows.seen[self.layer]

    def get_max_length(self) -> int:
        """-1: no limit per row. All rows share ``max_sequences * capacity`` cells."""
        return self.kind.size or -1

    @property
    def found(self) -> Pair | None:
        return self.rows.peek(self.layer, self.kind)


class CrossLayer(_OurLayer, _KeysAndValues, CacheLayerMixin):  # type: ignore[misc]
    """K and V of the encoder's output in one layer, stored once and read by all later tokens."""

    def __init__(self, rows: BatchRows, layer: int) -> None:
        self.rows, self.layer = rows, layer

    @property
    def is_initialized(self) -> bool:
        return self.rows.has_encoded(self.layer)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Pair:
        """Store K and V (rows, heads, length, dim) of the encoder's output; returns the stored ones."""
        self.rows.put_encoded(self.layer, key_states, value_states)
        pair = self.found
        assert pair is not None
        return pair

    @property
    def found(self) -> Pair | None:
        return self.rows.encoded(self.layer)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length(), 0

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else int(self.keys.shape[2])

    def get_max_length(self) -> int:
        return -1


def each_layer(cache: Any) -> Iterator[tuple[Any, ...]]:
    """K, V and the window (or None) of each layer, as in a loop over a DynamicCache."""
    for layer in cache.layers:
        yield layer.keys, layer.values, torch.tensor(layer.kind.size) if layer.is_sliding else None


class CrossCache(TransformersCache):  # type: ignore[misc]
    """The cache of all cross attention layers. Some models create another, empty one through this class."""

    def __init__(self, layers: Sequence[CrossLayer] = (), **options: Any) -> None:
        TransformersCache.__init__(self, layers=[*layers])

    __iter__ = each_layer


class Crossing:
    """An EncoderDecoderCache that keeps its own CrossCache if a model assigns an empty one."""

    _cross: CrossCache
    self_attention_cache: Any

    def update(self, *args: Any, **kwargs: Any) -> Any:
        return self.self_attention_cache.update(*args, **kwargs)

    @property
    def cross_attention_cache(self) -> CrossCache:
        return self._cross

    @cross_attention_cache.setter
    def cross_attention_cache(self, cache: Any) -> None:
        if not isinstance(cache, CrossCache):
            raise NotSupportedError(
                f"HFCache: a {type(cache).__name__} for cross attention, which this cache stores itself"
            )
        if len(cache) or not hasattr(self, "_cross"):
            self._cross = cache


class FetchedStates(Mapping[int, torch.Tensor | None]):
    """The states with one name in a layer, fetched on first use."""

    def __init__(self, states: States, layer: int, name: str, count: int) -> None:
        self.states, self.layer, self.name, self.count = states, layer, name, count

    def __getitem__(self, i: int) -> torch.Tensor | None:
        if not 0 <= i < self.count:
            raise KeyError(i)
        return self.states.fetch(self.layer, state_name(self.name, i))

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class LinearLayer(_OurLayer, LinearAttentionCacheLayerMixin):  # type: ignore[misc]
    """The convolution and recurrent states of one layer, in the recurrent cache."""

    def __init__(self, states: States, layer: int, kind: Kind, count: int = 1) -> None:
        self.states, self.layer, self.kind, self.rows = states, layer, kind, states.rows
        self.number_of_states = count

    @property
    def is_croppable(self) -> bool:
        """False: a recurrent state can only go back to a checkpoint, which ``crop`` reports."""
        return self.kind.name == CONV or self.states.convolves(self.layer)

    @property
    def is_initialized(self) -> bool:
        return self.states.started(self.layer)

    @property
    def has_previous_state(self) -> dict[int, bool]:
        return dict.fromkeys(range(self.number_of_states), self.states.started(self.layer))

    @property
    def conv_states(self) -> Mapping[int, torch.Tensor | None]:
        """The convolution states (rows, channels, kernel) before the next tokens. A one-token pass may write
        into them instead of calling ``update_conv_state``.
        """
        return FetchedStates(self.states, self.layer, "conv", self.number_of_states)

    @property
    def recurrent_states(self) -> Mapping[int, torch.Tensor | None]:
        """The recurrent states (rows, heads, key_dim, value_dim), likewise."""
        return FetchedStates(self.states, self.layer, "recurrent", self.number_of_states)

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Store new inputs (rows, channels, tokens); returns the previous inputs followed by the new ones.
        With ``Trait.WHOLE``, stores and returns the new states.
        """
        if Trait.WHOLE in self.rows.pool.plan.traits:
            return self.states.bring(self.layer, state_name("conv", state_idx), conv_states)
        return self.states.update_conv(self.layer, conv_states, conv_kernel_size, state_idx)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        if Trait.WHOLE in self.rows.pool.plan.traits:
            return self.states.bring(self.layer, state_name("recurrent", state_idx), recurrent_states)
        return self.states.update_recurrent(self.layer, recurrent_states, state_idx)


class HybridLayer(LinearLayer, AttentionLayer):  # type: ignore[override]
    """K and V of one layer, and its states."""

    def __init__(self, states: States, layer: int, kind: Kind, count: int) -> None:
        AttentionLayer.__init__(self, states.rows, layer, kind)
        LinearLayer.__init__(self, states, layer, kind, count)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Pair:
        self.states.settle(key_states)
        return AttentionLayer.update(self, key_states, value_states)
