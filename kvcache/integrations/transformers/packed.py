"""The cache passed to a model of transformers in a pass begun by the engine (``Layout``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

import ml
from kvcache import CausalCache, DenseBatch, NotSupportedError, StateCache, StateSpec
from kvcache.integrations.rows.caches import Kind
from kvcache.integrations.rows.driven import Layout
from kvcache.integrations.transformers.bridge import Bridge, dtype_of
from kvcache.integrations.transformers.deferred import Deferred
from kvcache.integrations.transformers.kinds import CROSS, Plan, Trait, empty_layer
from kvcache.integrations.transformers.passes import Pair
from kvcache.integrations.transformers.states import state_name
from kvcache.integrations.transformers.stored import tokens_of

__all__ = ["Call", "PassCache", "PassKeys"]

PLACES = "positions"
"""The extra of an indexer's keys that has their positions."""
Attend = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of the model: the tokens ``[begins[i], begins[i] + counts[i])`` of ``sequences[i]``.

    The model's inputs have ``rows`` rows and ``tokens`` columns.
    """

    ctx: ml.Context
    sequences: Sequence[int]
    begins: Sequence[int]
    counts: Sequence[int]
    rows: int
    tokens: int

    @property
    def fresh(self) -> bool:
        """Whether there are no earlier tokens."""
        return not any(self.begins)

    def parts(self) -> Iterator[tuple[int, slice, slice]]:
        """For each sequence its number, and the rows and columns of its tokens."""
        end = 0
        for i, count in enumerate(self.counts):
            if self.rows > 1:
                yield i, slice(i, i + 1), slice(None)
            else:
                begin, end = end, end + count
                yield i, slice(None), slice(begin, end)


class PassCache(TransformersCache):  # type: ignore[misc]
    """The layers of one of the engine's caches, in the pass of ``call``. ``caches``: the cache of each kind
    of attention.
    """

    call: Call

    def __init__(
        self,
        plan: Plan,
        caches: Mapping[Kind, CausalCache],
        recurrent: StateCache | None,
        bridge: Bridge,
        device: torch.device,
        layout: Layout,
    ) -> None:
        self.plan, self.caches, self.recurrent = plan, caches, recurrent
        self.bridge, self.device = bridge, device
        self.layout, self.attends = layout, plan.attends
        self._blank: tuple[tuple[object, ...], torch.Tensor] | None = None
        super().__init__(layers=[self._layer(i, kind) for i, kind in enumerate(plan.layers)])

    def _layer(self, i: int, kind: Kind) -> Any:
        if kind.name == CROSS:
            raise NotSupportedError(f"layer {i} attends to an encoder's output")
        count = self.plan.states[i]
        if i in self.plan.indexed:
            return IndexedPassLayer(self, i, kind)
        if count:
            return HybridPassLayer(self, i, kind, count) if kind.attends else StatesPassLayer(self, i, count)
        return AttentionPassLayer(self, i, kind) if kind.attends else empty_layer()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if isinstance(layer, AttentionPassLayer):
            return layer.get_seq_length()
        return max(self.call.begins)

    @property
    def is_initialized(self) -> bool:
        return not self.call.fresh

    @property
    def is_compileable(self) -> bool:
        return False

    def blank(self, like: torch.Tensor, tokens: int) -> torch.Tensor:
        """A tensor like ``like`` (rows, heads, tokens, dim) but for its tokens, without memory."""
        rows, heads, _, dim = like.shape
        asked = self.call, like.dtype, like.device, rows, heads, tokens, dim
        if self._blank is None or self._blank[0] != asked:  # further layers have the same
            self._blank = asked, like.new_empty(()).expand(rows, heads, tokens, dim)
        return self._blank[1]

    def read(self, layer: int, kind: Kind, i: int, like: torch.Tensor) -> Pair:
        """K and V (1, heads, tokens, dim) of everything that the call's tokens of sequence ``i`` may see."""
        call = self.call
        reading = DenseBatch(self.caches[kind], [call.sequences[i]], first_seen(kind, call.begins[i]))
        keys, values = reading.read(call.ctx.layer(layer), layer)
        pair = self.bridge.to_torch(keys, like), self.bridge.to_torch(values, like)
        if Trait.CONTIGUOUS in self.plan.traits:
            return pair[0].contiguous(), pair[1].contiguous()
        return pair


def first_seen(kind: Kind, begin: int) -> int:
    """The first position that a token at ``begin`` may see."""
    return max(0, begin - kind.size + 1) if kind.size else 0


class PassKeys:
    """A layer's K and V in a call, which ``attention`` finds as ``stored`` of its keys."""

    def __init__(self, cache: PassCache, ctx: ml.Context, layer: int, kind: Kind) -> None:
        self._cache, self._ctx, self._layer, self.kind, self.current = cache, ctx, layer, kind, cache.call

    def pair(self, key: torch.Tensor, value: torch.Tensor) -> Pair:
        """Deferred K and V of everything that the call may see; dense tensors exist only for a single
        sequence.
        """
        cache, call = self._cache, self.current
        tokens = call.begins[0] + call.tokens - first_seen(self.kind, call.begins[0])
        made: list[Pair] = []

        def make(which: int) -> torch.Tensor:
            if cache.layout is not Layout.ALONE:
                raise NotSupportedError(
                    f"it computes attention itself, which would see {cache.layout.value} as one text"
                )
            if not made:
                made.append(cache.read(self._layer, self.kind, 0, key))
            return made[0][which]

        pair = (
            Deferred.over(cache.blank(key, tokens), lambda: make(0)),
            Deferred.over(cache.blank(value, tokens), lambda: make(1)),
        )
        for one in pair:
            one.stored = self  # type: ignore[attr-defined]
        return pair

    def attend(
        self, query: torch.Tensor, pair: Pair, scale: float, sinks: torch.Tensor | None, mask: object
    ) -> torch.Tensor:
        """Attention (rows, tokens, heads, v_dim) of query (rows, heads, tokens, head_dim)."""
        cache, bridge, ctx = self._cache.caches[self.kind], self._cache.bridge, self._ctx
        cache.set_layer(self._layer)
        logits = None if sinks is None else bridge.to_backend(ctx, sinks)
        attended = cache.attend(ctx, bridge.to_backend(ctx, tokens_of(query)), scale, logits)
        rows, heads, tokens, _ = query.shape
        return bridge.to_torch(attended, query).view(rows, tokens, heads, -1)

    @property
    def several(self) -> bool:
        """Whether the keys cannot be one dense tensor."""
        return self._cache.layout is not Layout.ALONE

    def each(
        self,
        attend: Attend,
        make_mask: Callable[..., torch.Tensor | None],
        module: torch.nn.Module,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        options: Mapping[str, Any],
    ) -> tuple[torch.Tensor, None]:
        """``attend`` to each sequence separately, for options that caches do not support, such as soft
        caps.
        """
        pattern = getattr(mask, "pattern", None)
        name = type(module).__name__
        if pattern is None:
            raise NotSupportedError(f"{name} has a mask of its own, which treats all tokens as one text")
        for asked, option in options.items():
            if isinstance(option, torch.Tensor) and option.ndim > 1:
                raise NotSupportedError(f"attention of {name} asks for {asked}, which applies to one text")
        out: torch.Tensor | None = None
        for i, rows, columns in self.current.parts():
            key, value = self._cache.read(self._layer, self.kind, i, query)
            key.stored = None  # type: ignore[attr-defined]  # it was said why these are no longer ours
            begin, count = self.current.begins[i], self.current.counts[i]
            first = first_seen(self.kind, begin)
            own = make_mask(**{
                **pattern.options, "batch_size": 1, "q_length": count, "kv_length": key.shape[2],
                "q_offset": begin, "kv_offset": first,
            })  # fmt: skip
            part, _ = attend(module, query[rows, :, columns], key, value, own, **options)
            if out is None:
                out = part.new_empty((query.shape[0], query.shape[2], *part.shape[2:]))
            out[rows, columns] = part
        assert out is not None
        return out, None


class _PassLayer:
    """Shared by all layers."""

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False
    record_past = False

    def lazy_initialization(self, *args: Any, **options: Any) -> None:
        """A no-op: the engine has created the cache."""

    def get_max_length(self) -> int:
        return -1


class AttentionPassLayer(_PassLayer, CacheLayerMixin):  # type: ignore[misc]
    """K and V of one layer."""

    def __init__(self, owner: PassCache, layer: int, kind: Kind) -> None:
        self.owner, self.layer, self.kind = owner, layer, kind
        self.is_sliding = kind.size > 0
        self._had: Call | None = None

    keys = values = None

    @property
    def is_initialized(self) -> bool:
        return self.get_seq_length() > 0

    def put(self, layer: int, key: torch.Tensor, value: torch.Tensor | None, **options: Any) -> ml.Context:
        """Store K and V (rows, heads, new tokens, dim); returns the layer's context."""
        owner = self.owner
        cache, bridge, ctx = owner.caches[self.kind], owner.bridge, owner.call.ctx.layer(layer)
        cache.set_layer(layer)
        values = None if value is None else bridge.to_backend(ctx, tokens_of(value))
        cache.put(ctx, bridge.to_backend(ctx, tokens_of(key)), values, **options)
        return ctx

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **options: Any
    ) -> Pair:
        """Store K and V (rows, heads, new tokens, dim); returns deferred K and V of everything that the new
        tokens may see.
        """
        owner = self.owner
        ctx = self.put(self.layer, key_states, value_states)
        self._had = owner.call
        if not owner.attends:
            return owner.read(self.layer, self.kind, 0, key_states)
        return PassKeys(owner, ctx, self.layer, self.kind).pair(key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        begin = self.owner.call.begins[0]
        first = first_seen(self.kind, begin)
        return begin - first + query_length, first

    def get_seq_length(self) -> int:
        call = self.owner.call
        begin: int = max(call.begins)
        return begin + call.tokens if self._had is call else begin


class IndexedPassLayer(AttentionPassLayer):
    """K and V of one layer, and the keys of the indexer that selects the tokens attended to."""

    def __init__(self, owner: PassCache, layer: int, kind: Kind) -> None:
        super().__init__(owner, layer, kind)
        self._part = owner.plan.part(layer)
        self._indexed: Call | None = None
        self._brought: torch.Tensor | None = None
        """Positions (axes, 1, new tokens) of a call whose keys have not arrived yet."""

    @property
    def is_indexer_initialized(self) -> bool:
        return not self.owner.call.fresh or self._indexed is self.owner.call

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Store an indexer's keys (1, new tokens, dim); returns all keys of the sequence, (1, tokens,
        dim).
        """
        owner, keys, extra = self.owner, indexer_key_states[:, None], {}
        if self._brought is not None:
            places = self._brought.flatten(1).T.to(torch.int32)
            extra[PLACES] = owner.bridge.to_backend(owner.call.ctx.layer(self._part), places)
        self.put(self._part, keys, None, extra=extra)
        self._indexed, self._brought = owner.call, None
        return owner.read(self._part, self.kind, 0, keys)[0][:, 0]

    @property
    def indexer_position_ids(self) -> torch.Tensor | None:
        """Positions (axes, 1, tokens) of all tokens, I64, as set by the model; None if it has set none."""
        if not self.is_indexer_initialized:
            return None
        call, cache = self.owner.call, self.owner.caches[self.kind]
        count = call.begins[0] + (call.tokens if self._indexed is call else 0)
        reading = DenseBatch(cache, call.sequences[:1], unwritten=True)
        stored = reading.read_extra(call.ctx.layer(self._part), self._part, PLACES)
        if stored is None:
            return None
        like = torch.empty((), dtype=torch.int64, device=self.owner.device)
        return self.owner.bridge.to_torch(stored, like)[:, :count].permute(2, 0, 1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: torch.Tensor) -> None:
        self._brought = positions[..., self.owner.call.begins[0] :]


class StatesPassLayer(_PassLayer, LinearAttentionCacheLayerMixin):  # type: ignore[misc]
    """The convolution and recurrent states of one layer."""

    def __init__(self, owner: PassCache, layer: int, count: int) -> None:
        self.owner, self.layer, self.number_of_states = owner, layer, count

    @property
    def has_previous_state(self) -> dict[int, bool]:
        return dict.fromkeys(range(self.number_of_states), not self.owner.call.fresh)

    @property
    def conv_states(self) -> Mapping[int, torch.Tensor | None]:
        """The states (rows, channels, kernel) before the call; they may be written."""
        return self._fetched("conv")

    @property
    def recurrent_states(self) -> Mapping[int, torch.Tensor | None]:
        """The states (rows, heads, key_dim, value_dim), likewise."""
        return self._fetched("recurrent")

    def _fetched(self, name: str) -> dict[int, torch.Tensor | None]:
        return {i: self._state(state_name(name, i)) for i in range(self.number_of_states)}

    @property
    def _cache(self) -> StateCache:
        cache = self.owner.recurrent
        assert cache is not None
        return cache

    def _state(self, which: str) -> torch.Tensor | None:
        if self._cache.state_spec(which, self.layer) is None:
            return None
        ctx = self.owner.call.ctx.layer(self.layer)
        return self.owner.bridge.alias(self._cache.state(ctx, which, self.layer))

    def _write(self, which: str, states: torch.Tensor, dtype: ml.DType) -> torch.Tensor:
        ctx = self.owner.call.ctx.layer(self.layer)
        self._cache.learn_state(which, StateSpec(tuple(states.shape[1:]), dtype), self.layer)
        self._cache.update_state(ctx, which, self.owner.bridge.to_backend(ctx, states), self.layer)
        return states

    @property
    def _whole(self) -> bool:
        return Trait.WHOLE in self.owner.plan.traits

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
        which, inputs = state_name("conv", state_idx), conv_states
        if self._whole:
            return self._write(which, inputs, dtype_of(inputs.dtype))
        tokens = inputs.shape[-1]
        spec = self._cache.state_spec(which, self.layer)
        size = spec.shape[-1] if spec is not None else conv_kernel_size or tokens
        before = None if self.owner.call.fresh else self._state(which)
        if before is None:
            full = torch.nn.functional.pad(inputs, (max(0, size - tokens), 0))
        else:
            full = torch.cat((before.to(inputs.dtype), inputs), -1)
        self._write(which, full[..., -size:], dtype_of(inputs.dtype))
        return full

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        which = state_name("recurrent", state_idx)
        dtype = dtype_of(recurrent_states.dtype) if self._whole else ml.DType.F32
        return self._write(which, recurrent_states, dtype)


class HybridPassLayer(StatesPassLayer, AttentionPassLayer):
    """K and V of one layer, and its states."""

    def __init__(self, owner: PassCache, layer: int, kind: Kind, count: int) -> None:
        AttentionPassLayer.__init__(self, owner, layer, kind)
        StatesPassLayer.__init__(self, owner, layer, count)
