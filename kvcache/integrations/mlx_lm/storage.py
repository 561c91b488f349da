"""Stores a model's layers in kvcache's caches, with MLX arrays as input and output."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Any

import mlx.core as mx
import numpy as np

import ml
from kvcache import CacheFormat, CausalCache, DenseBatch, StateCache, StateSpec
from kvcache.cache import Batch, CacheDType, NotSupportedError, check_whole
from kvcache.integrations.conversations import check_known
from kvcache.integrations.mlx_lm.layers import Attention, Layer, Recurrent, Several, flat
from kvcache.integrations.mlx_lm.passes import ForwardPass
from kvcache.integrations.rows.caches import FULL, SLIDING, Kind, ModelCaches

__all__ = ["Codes", "PoolOptions", "Storage", "padded"]

_schedule: Any = mx.async_eval
WORTH = 16
"""The least saving, in units of ``CacheConfig.call_bytes``; below it, one call over padded rows is faster."""
LONG = 256 if find_spec("numba") else math.inf
"""From this position on, numba's kernel on a CPU is faster than MLX's attention."""


@dataclass(frozen=True, slots=True)
class Codes:
    """The codes of one sequence in a layer: parts of K and then V (1, kv_heads, tokens, width), by position.
    ``format`` is the name of the pool's format, ``activations`` the dtype of the original values.
    """

    format: str
    activations: str
    parts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """The options of a CachePool.

    Up to ``max_sequences`` rows, copies and finished conversations exist at once, of up to ``capacity``
    tokens each. ``dtype`` is the storage format of K and V (None: the model's dtype): an MLX dtype, or any
    format of ``Cache.init``, such as ``ml.DType.Q8_0``, "AFFINE8_64" or a pair. ``rollback`` is the number of
    tokens that sliding layers keep beyond their windows, so that they can be trimmed. ``checkpoints`` of the
    states of recurrent layers are kept per sequence, one every ``checkpoint_interval`` tokens, for
    ``rewind``. ``max_batch`` is the largest number of tokens in a pass, over all rows (None: 2048 per
    sequence). ``max_kv_size``, at least 5, is as in mlx-lm: a layer keeps the first 4 tokens permanently and
    the last ``max_kv_size - 4``, and rows have unlimited length. A query in a pass of several tokens sees
    what it sees with mlx-lm's RotatingKVCache, which differs slightly (see ``masks.seen_beside_kept``).
    ``backend`` is an open MLX backend (None: a new one), ``batch_invariant`` as in ``ml.CacheConfig``.
    """

    capacity: int = 4096
    max_sequences: int = 1
    dtype: CacheDType | None = None
    rollback: int = 64
    checkpoints: int = 4
    checkpoint_interval: int = 256
    max_batch: int | None = None
    max_kv_size: int | None = None
    backend: ml.Backend | None = None
    batch_invariant: bool = False

    @classmethod
    def of(cls, op: str, options: Mapping[str, Any]) -> PoolOptions:
        """The options from keywords. Raises InvalidRangeError for an unknown name or an invalid size."""
        check_known(op, options, [field.name for field in fields(cls)])
        checked = cls(**options)
        for name, least in _LEAST.items():
            size = getattr(checked, name)
            if size is not None:
                object.__setattr__(checked, name, check_whole(op, name, size, least))
        return checked


_LEAST = {
    "capacity": 1, "max_sequences": 1, "rollback": 0, "checkpoints": 0, "checkpoint_interval": 1,
    "max_batch": 1,
}  # fmt: skip


class Storage:
    """A cache for each kind of layer in ``entries``, combined in ``cache``. Sliding layers keep ``rollback``
    more tokens than their windows. ``cache``: an existing one with the same options, bound by its owner
    (None: a new one).
    """

    def __init__(
        self,
        entries: Sequence[Layer | Several],
        ctx: ml.Context,
        options: PoolOptions,
        one_length: bool = False,
        cache: Any = None,
    ) -> None:
        self.entries = list(entries)
        self.layers = flat(entries)
        """Nested layers are flattened and numbered individually."""
        self.ctx, self.rollback = ctx, options.rollback
        kinds = [_kind(layer) for layer in self.layers]
        used = sorted({kind for kind in kinds if kind is not None}, key=lambda kind: kind.size)
        if cache is None:
            states = _state_cache(ctx, self.layers, options)
            self.caches = ModelCaches(used, states, lookback=options.rollback)
        else:
            self.caches = ModelCaches.over(used, cache)
        self.states = self.caches.states
        self.attention = [None if kind is None else self.caches.caches[kind] for kind in kinds]
        """By layer, the cache of its K and V; None for the others."""
        self.cache: Any = self.caches.all
        bound = [] if cache is None else [*self.caches.caches.values()]
        self.format = bound[0].storage.dtype if bound else CacheFormat.of(self.computed)
        """The storage format of K and V."""
        self.saves_groups = False
        """Whether layers of full attention are saved as mlx-lm's QuantizedKVCache (``CachePool``)."""
        self.one_length = one_length or any(isinstance(x, Attention) and x.chunked for x in self.layers)
        """Whether the model assumes that all rows have the same number of tokens."""
        self.chooses = any(isinstance(x, Attention) and x.assigned for x in self.layers)
        """Whether the model has indexers, which may also select hidden columns."""
        self.alike_from = math.inf if self.one_length else max(map(_alike_from, self.layers), default=0)
        """The number of tokens from which the model confuses rows without padding; 0: never."""
        limits = [x.capacity for x in self.layers if isinstance(x, Recurrent) and x.capacity is not None]
        self.longest = min(limits, default=math.inf)
        """The most tokens of a row, even if the pool has more room."""
        self.wants_calls = self.alike_from > 0 or any(
            isinstance(x, Recurrent) and x.reads_first for x in self.layers
        )
        """Whether the model must announce its calls (``calls``)."""
        self.calls_told = False
        """Whether the model's calls are announced (``calls``)."""
        self.asked = False
        """Whether the model calls its entries' attention (``attend_by_entries``)."""

    def init(
        self, backend: ml.Backend, dtype: CacheDType | None, max_sequences: int, capacity: int, max_batch: int
    ) -> None:
        """Bind the caches and allocate their memory now, so that a lack of memory shows here and not in a
        step.
        """
        self.format = self.format if dtype is None else CacheFormat.of(dtype)
        self.cache.init(backend, self.format.asked, max_sequences, capacity, max_batch)
        ctx = self.ctx
        self.cache.start_forward(ctx, Batch([0], [0]), reserve=True)
        for i, (layer, cache) in enumerate(zip(self.layers, self.attention, strict=True)):
            if isinstance(layer, Recurrent):
                for k in range(len(layer.shapes)):
                    self.asked_state(i, k)
            elif cache is not None and layer.kv_heads and layer.key_dim and layer.value_dim is not None:
                like = _dtype(ctx, layer.dtype)
                key, value = (
                    ctx.zeros((1, layer.kv_heads, dim), like) for dim in (layer.key_dim, layer.value_dim)
                )
                cache.set_layer(i)
                cache.put(ctx, key, None if layer.keys_only else value)

    @property
    def computed(self) -> ml.DType:
        """The dtype of the first K whose dtype is known; F32 if none is."""
        known = (x.dtype for x in self.layers if isinstance(x, Attention) and x.dtype is not None)
        dtype = next(known, None)
        return ml.DType.F32 if dtype is None else _dtype(self.ctx, dtype)

    # K and V.

    def put(self, layer: int, one: ForwardPass, keys: Any, values: Any) -> None:
        """Store K and V of a layer, each (rows, kv_heads, tokens, dim)."""
        cache, ctx = self.attention_of(layer), self.ctx
        cache.set_layer(layer)
        key = one.stored(keys)
        if self._spec(layer).keys_only:
            cache.put(ctx, ctx.from_native(key))
            one.written = True
            return
        value = one.stored(values)
        _schedule(key, value)  # together: from_native would schedule one after the other
        cache.put(ctx, ctx.from_native(key), ctx.from_native(value))
        one.written = True

    def put_codes(self, layer: int, one: ForwardPass, codes: Codes) -> None:
        """As ``put``, for codes that are stored unchanged."""
        cache, ctx = self.attention_of(layer), self.ctx
        cache.set_layer(layer)
        words = [mx.view(x, mx.int32) if x.dtype == mx.uint32 else x for x in codes.parts]
        parts = [ctx.from_native(one.stored(x)) for x in words]
        spec = self._spec(layer)
        cache.put_stored(ctx, parts, ml.DType[codes.activations], spec.key_dim if spec.keys_only else None)
        one.written = True

    @property
    def groups(self) -> tuple[int, int] | None:
        """Group size and bits, if K and V are stored in the format of mlx-lm's QuantizedKVCache."""
        name = self.format.name  # AFFINE8_64: 8 bits in groups of 64
        if not name.startswith("AFFINE") or "/" in name:
            return None
        bits, group = map(int, name.removeprefix("AFFINE").split("_"))
        return group, bits

    def name_of(self, native: Any) -> str:
        """Our name for an MLX dtype."""
        return _dtype(self.ctx, native).name

    def codes(self, layer: int, seq: int | None) -> Codes | None:
        """The codes of one sequence in a layer; None if nothing is stored, or if the format is plain."""
        cache = self.attention_of(layer)
        if seq is None or self.format.plain is not None or layer not in cache.storage.buffers:
            return None
        ctx, cells = self.ctx, cache.storage.table.rows[seq].cells
        if not cells.size:
            return None
        cache.storage.table.join_arrivals(cells)
        parts = [x.contiguous(ctx) for x in DenseBatch(cache, [seq], uneven=True).read_stored(ctx, layer)]
        ctx.compute(*parts)
        activations = cache.storage.buffers[layer].activations.name
        return Codes(self.format.name, activations, tuple(x.native for x in parts))

    def get(self, layer: int, one: ForwardPass) -> tuple[Any, Any]:
        """K and V of a layer as arrays (rows, kv_heads, history, dim), for this pass."""
        cache, ctx = self.attention_of(layer), self.ctx
        cache.set_layer(layer)
        if self.reads_cells(one):
            key, value, _ = cache.get(ctx)
            keys, values = _arrays_of(_by_head(ctx, key), _by_head(ctx, value))
        else:
            keys, values = self.get_by_position(layer, one)
        spec = self._spec(layer)
        return keys, keys[..., : spec.value_dim] if spec.keys_only else values

    def reads_cells(self, one: ForwardPass) -> bool:
        """Whether K and V of a pass are read in the order of cells, with a mask."""
        return one.rows == 1 and one.is_full and not (self.one_length or self.chooses)

    def get_by_position(self, layer: int, one: ForwardPass) -> tuple[Any, Any]:
        """As ``get``, in the order of positions."""
        key, value = self.reading(self.attention_of(layer), one).read(self.ctx, layer)
        tensors: tuple[Any, Any] = key, value
        if self.attends(layer, one):  # lazy: the arrays may never be needed
            return tensors[0].read(), tensors[1].read()
        return _arrays_of(*tensors)

    def attends(self, layer: int, one: ForwardPass) -> bool:
        """Whether ``attend`` is faster than attention over ``get``: on a CPU from ``LONG`` on, or if it
        reads codes instead of floats, no padding, or no repeated tokens. Not over floats of another dtype
        than the model's, to which it would round the queries.
        """
        cache = self.attention_of(layer)
        if not self.asked or self.one_length or self._spec(layer).keys_only:
            return False
        if id(cache) not in one.attends:
            table, seen, longest, last = cache.storage.table, np.zeros(cache.cells, bool), 0, 0
            for seq in one.sequences:
                if seq is not None:
                    seen[table.rows[seq].cells] = True
                    longest, last = max(longest, len(table.rows[seq])), max(last, table.rows[seq].last)
            saved = one.rows * longest - int(np.count_nonzero(seen))
            buffers, compiled = cache.storage.buffers[layer], self.ctx.backend.devices[0].kind == "cpu"
            worth = WORTH * cache.config.call_bytes // buffers.bytes_per_cell
            faster = saved > worth or (compiled and last >= LONG)
            exact = buffers.read_dtype is buffers.activations
            one.attends[id(cache)] = self.format.plain is None or (faster and exact)
        return one.attends[id(cache)]

    def attend(self, layer: int, one: ForwardPass, queries: Any, scale: float, sinks: Any) -> Any:
        """Attention of queries (rows, heads, tokens, dim), in the same shape."""
        cache, ctx = self.attention_of(layer), self.ctx
        cache.set_layer(layer)
        logits = None if sinks is None else ctx.from_native(sinks)
        attended = cache.attend(ctx, ctx.from_native(one.stored(queries)), scale, logits)
        return one.given_back(attended.native)

    def reading(self, cache: CausalCache, one: ForwardPass) -> DenseBatch:
        reading: DenseBatch | None = one.readings.get(id(cache))
        if reading is None:
            reading = one.readings[id(cache)] = DenseBatch(cache, one.sequences, uneven=True)
        return reading

    def attention_of(self, layer: int) -> CausalCache:
        cache = self.attention[layer]
        if cache is None:
            raise NotSupportedError(f"update_and_fetch: layer {layer} is recurrent; it has no K and V")
        return cache

    def stored(
        self, layer: int, sequences: Sequence[int | None], one: ForwardPass | None = None
    ) -> tuple[Any, Any]:
        """K and V of a layer, (rows, kv_heads, tokens, dim), in the order of positions.

        ``one``: the current pass of the sequences, if any. Values that are not stored are 0.
        """
        if one is None:
            reading = DenseBatch(self.attention_of(layer), sequences, uneven=True)
            keys, values = (x.native for x in reading.read(self.ctx, layer))
        else:
            keys, values = self.get_by_position(layer, one)
        spec = self._spec(layer)
        return keys, mx.zeros_like(keys[..., : spec.value_dim]) if spec.keys_only else values

    def token_bytes(self, layer: int) -> int:
        """Bytes of one token's K and V in a layer."""
        spec = self._spec(layer)
        if not (spec.kv_heads and spec.key_dim and spec.value_dim is not None):
            return 0
        value_dim = None if spec.keys_only else spec.value_dim
        return self.format.nbytes(spec.kv_heads, spec.key_dim, value_dim, _dtype(self.ctx, spec.dtype))

    def _spec(self, layer: int) -> Attention:
        spec = self.layers[layer]
        assert isinstance(spec, Attention)
        return spec

    def tokens_of(self, layer: int, seq: int | None) -> int:
        """The number of tokens of a sequence in a layer's cache."""
        return 0 if seq is None else int(self.attention_of(layer).positions(seq).size)

    # States.

    def asked_state(self, layer: int, i: int) -> ml.Tensor:
        """State ``i`` of a recurrent layer in the current pass, (active rows, *shape)."""
        assert self.states is not None
        return self.states.state(self.ctx, _name(i), layer)

    def state(self, layer: int, i: int, one: ForwardPass, is_set: bool) -> Any:
        """State ``i`` of a layer as an array (rows, *shape); rows that add nothing to the pass read as 0.

        ``is_set``: whether it is already the state after the pass.
        """
        state, spec = self.asked_state(layer, i).native, self.layers[layer]
        assert isinstance(spec, Recurrent)
        state = _grown(spec, i, state.astype(spec.dtypes[i]), max(one.after if is_set else one.before))
        if len(one.active) == one.rows:
            return state
        whole = mx.zeros((one.rows, *state.shape[1:]), state.dtype)
        whole[mx.array(one.active)] = state
        return whole

    def set_state(self, layer: int, i: int, one: ForwardPass, value: Any) -> None:
        assert self.states is not None
        if len(one.active) != one.rows:
            value = value[mx.array(one.active)]
        spec = self.layers[layer]
        assert isinstance(spec, Recurrent)
        value = padded(value, spec.shapes[i])
        self.states.update_state(self.ctx, _name(i), self.ctx.from_native(value), layer)
        one.written = True

    def kept_state(self, layer: int, i: int, seq: int | None) -> Any:
        """State ``i`` of one sequence outside of a pass, (1, *shape); None if nothing is stored."""
        spec = self.layers[layer]
        assert self.states is not None
        assert isinstance(spec, Recurrent)
        if seq is None:
            return None
        offset = self.states.offset(seq)
        kept = self.states.snapshot(seq, offset, offset).states
        state = kept.get((_name(i), layer))
        return None if state is None else _grown(spec, i, state.native.astype(spec.dtypes[i]), offset)


def _kind(layer: Layer) -> Kind | None:
    if isinstance(layer, Recurrent):
        return None
    return Kind(FULL) if layer.window is None else Kind(SLIDING, layer.window, layer.keep)


def _by_head(ctx: ml.Context, x: ml.Tensor) -> ml.Tensor:
    """A view of (history, heads, dim) as (1, heads, history, dim)."""
    (history, heads, dim), (row, head, step) = x.shape, x.strides
    return x.view(ctx, 0, (1, heads, history, dim), (head, head, row, step))


def _arrays_of(keys: Any, values: Any) -> tuple[Any, Any]:
    """As ``native``, both at once."""
    arrays = keys.backend.natives(keys, values)
    return arrays[0], arrays[1]


def _alike_from(layer: Layer) -> int:
    """The number of tokens from which a layer confuses rows; 0: never."""
    if not isinstance(layer, Recurrent):
        return 0
    sizes = [
        shape[grows.axis]
        for shape, grows in zip(layer.shapes, layer.growing, strict=False)
        if grows is not None
    ]
    return max(not layer.masked, *sizes, 0)


def padded(value: Any, shape: Sequence[int]) -> Any:
    """A growing state (rows, *size), padded with zeros in front to (rows, *shape)."""
    missing = [0, *(size - have for size, have in zip(shape, value.shape[1:], strict=True))]
    return mx.pad(value, [(size, 0) for size in missing]) if any(missing) else value


def _grown(spec: Recurrent, i: int, value: Any, tokens: int) -> Any:
    """The part of a stored state (rows, *shape) that it has grown to after these tokens."""
    grows = spec.growing[i] if spec.growing else None
    if grows is None:
        return value
    full = spec.shapes[i][grows.axis]
    size = grows.size(full, tokens)
    return value if size == full else mx.split(value, [full - size], axis=grows.axis + 1)[1]


def _state_cache(ctx: ml.Context, layers: Sequence[Layer], options: PoolOptions) -> StateCache | None:
    states: dict[int | None, dict[str, StateSpec]] = {}
    for i, layer in enumerate(layers):
        if isinstance(layer, Recurrent):
            pairs = enumerate(zip(layer.shapes, layer.dtypes, strict=True))
            states[i] = {_name(k): StateSpec(shape, _dtype(ctx, dtype)) for k, (shape, dtype) in pairs}
    if not states:
        return None
    return StateCache(states, options.checkpoints, options.checkpoint_interval, skips=True)


def _name(i: int) -> str:
    """The name of state ``i`` of a layer in the cache of states."""
    return f"state{i}"


def _dtype(ctx: ml.Context, native: Any) -> ml.DType:
    return ctx.from_native(mx.zeros((1,), native)).dtype
