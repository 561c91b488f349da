"""HFStaticCache: fixed shapes, for ``torch.compile``. Every step sees the whole buffers of our caches. A
compiled step cannot query a cell table in Python. Each row therefore claims all of its ``capacity``
positions, in adjacent cells, when the first keys arrive, and a step writes at the position in a counter on
the device. transformers' masks hide positions that are not stored yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Self, cast

import torch
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import (
    EncoderDecoderCache,
    LinearAttentionLayer,
    StaticIndexedLayer,
    StaticLayer,
)
from transformers.utils import is_torchdynamo_compiling

import ml
from kvcache import (
    Batch,
    CacheFullError,
    CausalCache,
    DenseBatch,
    InvalidRangeError,
    NotSupportedError,
    OrderError,
    StateSpec,
)
from kvcache.integrations.conversations import show_options
from kvcache.integrations.transformers.arguments import (
    CacheOptions,
    check_names,
    check_options,
)
from kvcache.integrations.transformers.indexers import put_indexer_keys
from kvcache.integrations.transformers.kinds import CROSS, Kind, Trait, empty_layer, layer_plan
from kvcache.integrations.transformers.layers import CrossCache, Crossing, CrossLayer, RowsCache
from kvcache.integrations.transformers.passes import ForwardPass, Pair
from kvcache.integrations.transformers.pool import CachePool
from kvcache.integrations.transformers.rows import BatchRows, cannot_crop
from kvcache.integrations.transformers.states import state_name

__all__ = ["HFStaticCache", "HFStaticEncoderDecoderCache"]


class HFStaticCache(RowsCache):
    """A cache with the same shapes at every step, like transformers' StaticCache. ``generate`` compiles the
    model's step with it whenever it would with transformers' own. Windows are stored whole. ``crop`` and
    beams are supported; forks, ``remove`` and quantized storage need HFCache.
    """

    rows: StaticBatchRows

    def __new__(cls, config: Any = None, *args: Any, **options: Any) -> Self:
        """For an encoder-decoder's config, makes the subclass that is also an ``EncoderDecoderCache``."""
        check_names("HFStaticCache", ["capacity", "backend", "max_sequences"], args, options)
        if cls is HFStaticCache and getattr(config, "is_encoder_decoder", False):
            return cast("Self", super().__new__(HFStaticEncoderDecoderCache))
        return cast("Self", super().__new__(cls))

    def __init__(
        self,
        config: Any,
        *,
        capacity: int,
        backend: ml.Backend | str | None = None,
        max_sequences: int | None = None,
    ) -> None:
        """A cache for models of ``config``, with ``capacity`` tokens in each row, including padding.
        ``backend`` must share memory with the model; None: torch on its device. Memory is allocated when the
        first keys arrive, for ``max_sequences`` rows (None: those of the first batch).
        """
        # Windows keep everything: a view of the whole has no gaps.
        options = CacheOptions(backend, max_sequences, capacity, lookback=capacity)
        check_options("HFStaticCache", options)
        plan = layer_plan(config)
        for trait in (Trait.OWN_MASK, Trait.OWN_CLASS, Trait.COMPRESSED):
            plan.refuse("HFStaticCache", trait, "use HFCache")
        self._attach(StaticBatchRows(CachePool(plan, options)))

    def __repr__(self) -> str:
        pool = self.rows.pool
        longest = max(self.rows.held(), default=0)
        stored = f"rows: {len(self.rows.sequences)}, tokens of each: {longest}" if pool.bound else "empty"
        return f"<HFStaticCache, layers: {len(self.layers)}, capacity: {pool.options.capacity}, {stored}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        raise NotSupportedError(
            "deepcopy: an HFStaticCache, whose buffers must keep their addresses; use an HFCache, which can "
            "be copied and forked"
        )

    def _attach(self, rows: StaticBatchRows) -> None:
        self.rows = rows
        plan = rows.pool.plan
        TransformersCache.__init__(self, layers=[_layer(rows, i, kind) for i, kind in enumerate(plan.layers)])

    @property
    def stored(self) -> int:
        return max(self.rows.held(), default=0)

    def begun(self, mask: torch.Tensor, tokens: int) -> torch.Tensor:
        """Nobody counts the tokens of states, but padding leaves them 0, and a token does not."""
        if self.rows.sequences:
            self.rows.claim(len(mask), mask)  # refuses other numbers of rows
        begun = mask.new_zeros(mask.shape[0], dtype=torch.bool)
        for layer in _layers(self):
            if isinstance(layer, StaticLinearLayer):
                begun |= layer.begun(begun)
        return begun

    def crop(self, tokens: int) -> None:
        """Remove the last ``-tokens`` tokens, or keep the first ``tokens`` if it is > 0. Raises
        NotSupportedError with linear attention, whose states have no checkpoints here.
        """
        if tokens == 0:
            return
        lengths = self.rows.held()
        most, least = max(lengths, default=0), min(lengths, default=0)
        length = tokens if tokens > 0 else most + tokens
        if not 0 <= length <= least:
            raise cannot_crop(length, least)
        layers = _layers(self)
        if length < most and any(isinstance(layer, StaticLinearLayer) for layer in layers):
            raise NotSupportedError(
                f"crop: {most - length} tokens of recurrent states of fixed shapes; use HFCache, which has "
                "checkpoints"
            )
        for layer in layers:
            if isinstance(layer, StaticAttentionLayer):
                layer.keep(length)


show_options(HFStaticCache, "config", partial(HFStaticCache.__init__, None, None))  # type: ignore[arg-type]


class HFStaticEncoderDecoderCache(Crossing, HFStaticCache, EncoderDecoderCache):  # type: ignore[misc]
    """HFStaticCache for encoder-decoders; ``HFStaticCache(config)`` returns one for such a config."""

    def _attach(self, rows: StaticBatchRows) -> None:
        self.rows = rows
        cross = CrossCache([StaticCrossLayer(rows, i) for i in rows.pool.plan.crossing])
        EncoderDecoderCache.__init__(self, HFStaticCache.of(rows), cross)

    def reset(self) -> None:
        """Remove all tokens and the encoder's output."""
        EncoderDecoderCache.reset(self)
        self.rows.forget_encoded()


def _layers(cache: Any) -> list[Any]:
    """The layers of a decoder that store something."""
    decoder = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    return [layer for layer in decoder.layers if isinstance(layer, StaticAttentionLayer | StaticLinearLayer)]


def _layer(rows: StaticBatchRows, i: int, kind: Kind) -> Any:
    if kind.name == CROSS:
        return StaticCrossLayer(rows, i)
    if i in rows.pool.plan.indexed:
        return StaticIndexerLayer(rows, i, kind)
    if count := rows.pool.plan.states[i]:
        return StaticHybridLayer(rows, i, kind, count) if kind.attends else StaticLinearLayer(rows, i, count)
    return StaticAttentionLayer(rows, i, kind) if kind.attends else empty_layer()


class StaticBatchRows(BatchRows):
    """Rows that own all of their positions from the beginning. ``seen`` counts only what the host knows;
    compiled or captured passes are counted on the device.
    """

    def __init__(self, pool: CachePool) -> None:
        super().__init__(pool)
        self.counters: dict[int, torch.Tensor] = {}
        """By layer, the counter of its tokens on the device."""

    def held(self) -> list[int]:
        """The number of tokens of each layer that has any. Waits for the device."""
        counters = [*self.counters.values()]
        counts = [counter.to(counters[0].device) for counter in counters]
        return [count for count in torch.stack(counts).tolist() if count] if counts else []

    def most(self, rows: int) -> tuple[int, str] | None:
        """The positions of a row, all of which it owns from the beginning."""
        capacity = self.pool.options.capacity
        return capacity, f"a row has capacity={capacity} cells; pass a larger capacity="

    def check_complete(self, op: str, whole: bool = False) -> None:
        """Raise after a pass that did not reach all layers, if the host knows of it."""
        if len({*self.seen} - {0}) > 1 and len({*(lengths := self.held())}) > 1:
            raise self.unfinished(op, min(lengths), max(lengths))

    def unfinished(self, op: str, least: int, most: int) -> OrderError:
        """The error for layers with ``least`` to ``most`` tokens."""
        undone = least and not any(self.pool.plan.states)
        return OrderError(
            f"{op}: layers hold {least} to {most} tokens: a forward pass did not reach all of them. "
            + (f"Call crop({least - most}) to undo it" if undone else "Call reset() and start again")
        )

    def claim(self, batch: int, like: torch.Tensor) -> None:
        """Assign cells for all positions to every row, once."""
        if self.sequences:
            if batch != len(self.sequences):
                raise InvalidRangeError(
                    f"HFStaticCache: a batch of {batch} rows; its shapes are fixed for {len(self.sequences)}"
                )
            return
        pool = self.pool
        pool.bind(batch, like)
        self.become(pool.take(batch))
        self._pass = pool.current = ForwardPass(0, pool.options.capacity)
        whole = self._batch(pool.options.capacity, pool.options.capacity)
        try:
            for cache in pool.family.tops:
                cache.start_forward(pool.ctx, whole)
        except BaseException:
            self.become([])
            raise

    def forget_encoded(self) -> None:
        """Prepare for a new output of the encoder, which may have a different length."""
        pool = self.pool
        for seq in self.sequences:
            pool.family.cross.remove(seq, 0)
        if self.sequences:
            pool.family.cross.start_forward(pool.ctx, self._batch(1, 1))

    def views(self, layer: int, kind: Kind, key: torch.Tensor, value: torch.Tensor) -> Pair:
        """Views of a layer's buffers (rows, heads, capacity, dim), for keys and values like these."""
        cache = self._reserved(kind, key)
        self._put(cache, layer, _one_token(key), _one_token(value))
        return self._whole(layer, kind)

    def indexer_view(self, layer: int, kind: Kind, keys: torch.Tensor) -> torch.Tensor:
        """A view of the buffer (rows, capacity, dim) of a layer's indexer, for keys like these."""
        self._reserved(kind, keys)
        part = self.pool.plan.part(layer)
        put_indexer_keys(self, part, kind, torch.zeros_like(keys[:, :1]))
        return self._whole(part, kind)[0][:, 0]

    def _reserved(self, kind: Kind, like: torch.Tensor) -> CausalCache:
        """The cache of a kind, in a ``reserve`` pass, which allocates and stores nothing."""
        self.claim(like.shape[0], like)
        cache = self.pool.family.caches[kind]
        cache.start_forward(self.pool.ctx, Batch([0] * len(self.sequences), self.sequences), reserve=True)
        return cache

    def _whole(self, layer: int, kind: Kind) -> Pair:
        pool, cache = self.pool, self.pool.family.caches[kind]
        reading = DenseBatch(cache, self.sequences, unwritten=True)
        if not reading.is_view:
            raise NotSupportedError("HFStaticCache: the rows are not evenly spaced, which fixed shapes need")
        keys, values = reading.read(pool.ctx.layer(layer), layer)
        return _addressed(pool.bridge.alias(keys)), _addressed(pool.bridge.alias(values))


class StaticAttentionLayer(StaticLayer):  # type: ignore[misc]
    """transformers' static layer on our buffers. Windows are stored and shown whole."""

    cumulative_length: torch.Tensor

    def __init__(self, rows: StaticBatchRows, layer: int, kind: Kind) -> None:
        super().__init__(max_cache_len=rows.pool.options.capacity)
        self.rows, self.layer, self.kind = rows, layer, kind
        self.is_sliding = kind.size > 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size, self.num_heads = key_states.shape[:2]
        self.k_head_dim, self.v_head_dim = key_states.shape[-1], value_states.shape[-1]
        self.keys, self.values = self.rows.views(self.layer, self.kind, *_alike(key_states, value_states))
        if self.keys.device != self.device:
            raise NotSupportedError(
                f"HFStaticCache: fixed shapes on {self.keys.device} for a model on {self.device}"
            )
        self.cumulative_length = _addressed(self.cumulative_length.to(self.device))
        self.rows.counters[self.layer] = self.cumulative_length
        self.is_initialized = True

    def get_seq_length(self) -> Any:
        """A copy of the counter: flex attention evaluates its mask after ``update``, which advances it."""
        length = super().get_seq_length()
        return length.clone() if isinstance(length, torch.Tensor) else length

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Pair:
        if not is_torchdynamo_compiling():
            if self.is_initialized:
                self._check_like(key_states, value_states)
            self._check(key_states.shape[2])
            self._check_begun(key_states.shape[2])
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        pair: Pair = super().update(key_states.to(self.keys.dtype), value_states.to(self.values.dtype))
        if not (is_torchdynamo_compiling() or _is_captured(key_states)):
            self.rows.seen[self.layer] += key_states.shape[2]
        if Trait.CONTIGUOUS in self.rows.pool.plan.traits:
            return pair[0].contiguous(), pair[1].contiguous()
        return pair

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(capacity, 0). Outside of compiled code, raises CacheFullError for tokens that do not fit, and
        OrderError after a pass that failed midway.
        """
        if not is_torchdynamo_compiling():
            self.rows.check_complete("HFStaticCache")
            self._check(query_length)
        return self.max_cache_len, 0

    def _check_like(self, *new: torch.Tensor) -> None:
        """Refuse rows, heads or sizes other than the layer's, and dtypes that would be rounded."""
        for name, one, buffer in zip(("keys", "values"), new, (self.keys, self.values), strict=True):
            wanted = (*buffer.shape[:2], one.shape[2], buffer.shape[3])
            rounded = torch.promote_types(one.dtype, buffer.dtype) != buffer.dtype
            if tuple(one.shape) != wanted or rounded:
                raise InvalidRangeError(
                    f"HFStaticCache: {name} {tuple(one.shape)} in {one.dtype} for layer {self.layer}, whose "
                    f"shapes are fixed: they must be {wanted} in {buffer.dtype}"
                )

    def _check(self, tokens: int) -> None:
        on_cpu = self.cumulative_length.device.type == "cpu"
        stored = int(self.cumulative_length) if on_cpu else self.rows.seen[self.layer]
        if stored and tokens > 1:
            remedy = f"pass these {tokens} tokens one at a time"
            self.rows.pool.plan.refuse("HFStaticCache", Trait.BY_ONE, remedy)
        if stored + tokens > self.max_cache_len:
            raise CacheFullError(
                tokens, self.max_cache_len - stored, dict.fromkeys(self.rows.sequences, stored),
                "HFStaticCache",
                f"a row has capacity={self.max_cache_len} cells, padding included: pass a larger capacity=",
            )  # fmt: skip

    def _check_begun(self, tokens: int) -> None:
        """Refuse an empty layer in a pass after others: the first pass did not reach it."""
        most = max(self.rows.seen)
        if not self.rows.seen[self.layer] and most > tokens and not int(self.cumulative_length):
            raise self.rows.unfinished("HFStaticCache", 0, most)

    def crop(self, tokens_to_remove: int) -> None:
        """Removed tokens are hidden by the masks until they are overwritten."""
        self.cumulative_length.sub_(-tokens_to_remove)
        self.rows.seen[self.layer] = max(0, self.rows.seen[self.layer] + tokens_to_remove)

    def keep(self, length: int) -> None:
        """Remove everything after the first ``length`` tokens."""
        self.cumulative_length.clamp_(max=length)
        self.rows.seen[self.layer] = min(self.rows.seen[self.layer], length)

    def reset(self) -> None:
        self.keep(0)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """In place, since compiled code contains the addresses."""
        if self.is_initialized:
            _reorder((self.keys, self.values), beam_idx)


class StaticIndexerLayer(StaticAttentionLayer, StaticIndexedLayer):  # type: ignore[misc]
    """transformers' static layer with the keys of an indexer, all on our buffers."""

    indexer_position_ids: torch.Tensor | None

    def lazy_initialization_indexer(self, indexer_key_states: torch.Tensor) -> None:
        keys = indexer_key_states
        self.indexer_dtype, self.indexer_device = keys.dtype, keys.device
        self.indexer_keys = _addressed(self.rows.indexer_view(self.layer, self.kind, keys))
        self.indexer_cumulative_length = _addressed(torch.zeros((), dtype=torch.long, device=keys.device))
        self.is_indexer_initialized = True

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        if not self.is_indexer_initialized:
            self.lazy_initialization_indexer(indexer_key_states)
        keys: torch.Tensor = super().update_indexer(indexer_key_states.to(self.indexer_keys.dtype))
        return keys

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self.indexer_position_ids is not None and tokens_to_remove:
            self.indexer_position_ids = self.indexer_position_ids[..., :tokens_to_remove]
        if self.is_indexer_initialized:
            self.indexer_cumulative_length.sub_(-tokens_to_remove)

    def keep(self, length: int) -> None:
        super().keep(length)
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = self.indexer_position_ids[..., :length] if length else None
        if self.is_indexer_initialized:
            self.indexer_cumulative_length.clamp_(max=length)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.is_indexer_initialized:
            _reorder((self.indexer_keys,), beam_idx)
        if self.indexer_position_ids is not None:
            places = self.indexer_position_ids
            self.indexer_position_ids = places.index_select(1, beam_idx.to(places.device))


class StaticCrossLayer(CrossLayer):
    """K and V of the encoder's output, read once, since they do not change until replaced."""

    is_compileable = True

    def __init__(self, rows: StaticBatchRows, layer: int) -> None:
        super().__init__(rows, layer)
        self._pair: Pair | None = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Pair:
        rows = self.rows
        assert isinstance(rows, StaticBatchRows)
        rows.claim(key_states.shape[0], key_states)
        rows.put_encoded(self.layer, key_states, value_states)
        keys, values = rows.encoded(self.layer) or (key_states, value_states)
        self._pair = _addressed(keys), _addressed(values)
        return self._pair

    @property
    def found(self) -> Pair | None:
        return self._pair

    def reset(self) -> None:
        self._pair = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Beams of one input read the same output; others are reordered as the decoder's are."""
        _reorder(self._pair or (), beam_idx)


class StaticLinearLayer(LinearAttentionLayer):  # type: ignore[misc]
    """transformers' layer of linear attention on the states of our recurrent cache."""

    def __init__(self, rows: StaticBatchRows, layer: int, count: int = 1) -> None:
        LinearAttentionLayer.__init__(self, count)
        self.rows, self.layer = rows, layer

    def lazy_initialization(
        self,
        conv_states: torch.Tensor | None = None,
        recurrent_states: torch.Tensor | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> None:
        rows, like = self.rows, conv_states if conv_states is not None else recurrent_states
        assert like is not None
        rows.claim(like.shape[0], like)
        pool, cache = rows.pool, rows.pool.family.states
        assert cache is not None
        self.dtype, self.device = like.dtype, like.device
        at = pool.place(self.layer, like)
        if conv_states is not None:
            size = conv_kernel_size or conv_states.shape[-1]
            name = state_name("conv", state_idx)
            cache.learn_state(name, StateSpec((conv_states.shape[1], size)), self.layer)
            self.conv_kernel_size[state_idx] = size
            self.conv_states[state_idx] = _addressed(pool.bridge.alias(cache.state(at, name, self.layer)))
            self.is_conv_states_initialized[state_idx] = True
        if recurrent_states is not None:
            name = state_name("recurrent", state_idx)
            cache.learn_state(name, StateSpec(tuple(recurrent_states.shape[1:]), ml.DType.F32), self.layer)
            state = pool.bridge.alias(cache.state(at, name, self.layer))
            self.recurrent_states[state_idx] = _addressed(state)
            self.is_recurrent_states_initialized[state_idx] = True

    def update_conv_state(self, conv_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Raises InvalidRangeError for a batch with a different number of rows."""
        if not is_torchdynamo_compiling():
            self.rows.claim(conv_states.shape[0], conv_states)
        state: torch.Tensor = super().update_conv_state(conv_states, *args, **kwargs)
        return state

    def begun(self, rows: torch.Tensor) -> torch.Tensor:
        """By row, like ``rows``, whether a state is not 0."""
        begun = torch.zeros_like(rows)
        for states in (self.conv_states, self.recurrent_states):
            for i, state in states.items():
                if state is not None and self.has_previous_state[i]:
                    begun |= state.flatten(1).any(1).to(rows.device)
        return begun

    def activate_past_recording(self) -> None:
        """A no-op: states of fixed shapes cannot go back, as ``crop`` reports."""

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        _reorder((*self.conv_states.values(), *self.recurrent_states.values()), beam_idx)


class StaticHybridLayer(StaticLinearLayer, StaticAttentionLayer):
    """K and V of one layer at fixed shapes, and its states."""

    def __init__(self, rows: StaticBatchRows, layer: int, kind: Kind, count: int) -> None:
        StaticAttentionLayer.__init__(self, rows, layer, kind)
        StaticLinearLayer.__init__(self, rows, layer, count)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Initialize K and V, passed by position, or states, passed by name."""
        (StaticAttentionLayer if args else StaticLinearLayer).lazy_initialization(self, *args, **kwargs)

    def get_max_length(self) -> int:
        return int(StaticAttentionLayer.get_max_length(self))

    def reset(self) -> None:
        StaticLinearLayer.reset(self)
        StaticAttentionLayer.reset(self)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        StaticLinearLayer.reorder_cache(self, beam_idx)
        StaticAttentionLayer.reorder_cache(self, beam_idx)


def _reorder(tensors: Iterable[torch.Tensor | None], beam_idx: torch.Tensor) -> None:
    """Replace row i by the previous row ``beam_idx[i]``, in place."""
    for tensor in tensors:
        if tensor is not None:
            tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device)))


def _is_captured(x: torch.Tensor) -> bool:
    """Whether work on ``x`` is being captured in a CUDA graph."""
    return x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _alike(key: torch.Tensor, value: torch.Tensor) -> Pair:
    """Both in the wider dtype: autocast may compute keys and values in different ones."""
    dtype = torch.promote_types(key.dtype, value.dtype)
    return key.to(dtype), value.to(dtype)


def _one_token(x: torch.Tensor) -> torch.Tensor:
    """Zeros like one token of ``x``, which may be empty (``early_initialization``)."""
    return x.new_zeros((*x.shape[:2], 1, x.shape[3]))


def _addressed(tensor: torch.Tensor) -> torch.Tensor:
    """Tell torch.compile that the address is static, unless it is tracing."""
    if not is_torchdynamo_compiling():
        torch._dynamo.mark_static_address(tensor)
    return tensor
