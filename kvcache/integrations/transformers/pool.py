"""The caches of one transformers cache and its forks, bound when the first keys arrive."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import ml
from kvcache import (
    CacheFormat,
    DenseBatch,
    InvalidRangeError,
    InvalidSequenceError,
    KVCacheError,
    NotSupportedError,
    OrderError,
    SlidingWindowCache,
    Snapshot,
    StateCache,
    StateSpec,
)
from kvcache.integrations.rows.caches import ModelCaches, Top
from kvcache.integrations.rows.sequences import Sequences, SharedSequence
from kvcache.integrations.transformers.arguments import CacheOptions
from kvcache.integrations.transformers.bridge import Bridge, bridge_to, dtype_of, stored_dtype
from kvcache.integrations.transformers.kinds import Kind, Plan, Trait
from kvcache.integrations.transformers.layer_views import LayerViews
from kvcache.integrations.transformers.masks import trim_masks
from kvcache.integrations.transformers.passes import ForwardPass, Pair
from kvcache.integrations.transformers.places import Places, opened

__all__ = ["CachePool"]


class CachePool:
    """The caches of one model, and which of their sequences are in use."""

    family: ModelCaches
    backend: ml.Backend
    ctx: ml.Context
    bridge: Bridge
    places: Places
    like: torch.Tensor
    """An empty tensor with the dtype and the device of the model's first keys."""
    activations: ml.DType
    dtype: CacheFormat
    sequences: Sequences

    def __init__(self, plan: Plan, options: CacheOptions) -> None:
        self.plan, self.options = plan, options
        trim_masks(plan.model_type)
        self._in_one_piece = Trait.CONTIGUOUS in plan.traits
        self.bound = False
        self.current: ForwardPass | None = None
        """The current pass; the caches have one at a time."""
        self.views: dict[int, LayerViews | None] = {}
        """By layer, its fast path; None if it has none."""
        self.shown: dict[Kind, np.ndarray | None] = {}
        """By kind, what the last pass's mask showed; None: everything."""

    def __reduce__(self) -> str:
        raise NotSupportedError(
            "pickle: a cache's content is in buffers of an open backend; use HFCache.save(store, key), and "
            "load(store, key) in the other process"
        )

    def bind(self, batch: int, like: torch.Tensor) -> None:
        """Create the caches for a first batch of ``batch`` sequences with activations like ``like``."""
        if self.bound:
            return
        options = self.options
        # Under autocast some layers put narrower floats; F32 represents all of them.
        dtype = torch.float32 if torch.is_autocast_enabled(like.device.type) else like.dtype
        self.like = torch.empty(0, dtype=dtype, device=like.device)
        self.activations = dtype_of(dtype)
        self.dtype = stored_dtype(options.dtype) or CacheFormat.of(self.activations)
        self.backend = backend = opened(options.backend, like.device, self.plan)
        self.ctx = backend.new_context()
        self.bridge = bridge_to(backend)
        self.places = Places(self.ctx, self.like, follows=options.backend is None)
        count = options.max_sequences or batch
        self.family, self.views = self._new_family(options, count), {}
        self.sequences = Sequences(count, self.family.all)
        self.bound = True

    @contextlib.contextmanager
    def bound_to(self, batch: int, like: torch.Tensor) -> Iterator[None]:
        """Bind as ``bind`` does, and undo it if the block raises."""
        bound = self.bound
        self.bind(batch, like)
        try:
            yield
        except BaseException:
            self.bound = bound
            raise

    def _new_family(self, options: CacheOptions, count: int) -> ModelCaches:
        plan, states = self.plan, None
        if plan.is_hybrid:
            two = {"conv": StateSpec(plan.conv_shape), "recurrent": StateSpec(plan.state_shape, ml.DType.F32)}
            states = StateCache({None: two if plan.conv_shape else {}}, dtype=self.activations)
        family = ModelCaches(
            plan.kinds, states, lookback=options.lookback, shift=options.shift, encoder=plan.encoder
        )
        for cache in family.tops:
            cache.init(
                self.backend,
                self.dtype.asked,
                count,
                options.capacity,
                self._max_batch(cache, count),
            )
        return family

    def _max_batch(self, cache: Top, max_sequences: int) -> int:
        """The largest batch: as many new tokens as a window keeps."""
        if isinstance(cache, SlidingWindowCache):  # a longer batch stores only its last tokens
            return max_sequences * max(cache.memory, cache.window + 1)
        return max_sequences

    def check_dtype(self, layer: int, *brought: torch.Tensor) -> None:
        """Refuse tensors that would be rounded to the first keys' dtype, unless the caller chose the
        dtype.
        """
        for tensor in brought if self.options.dtype is None else ():
            dtype = dtype_of(tensor.dtype)
            if self.dtype.plain not in (dtype, ml.DType.F32):
                raise ml.DTypeError(
                    f"HFCache: layer {layer} puts {dtype.name}; keys and values are stored as "
                    f"{self.dtype.name}, the dtype of the first; pass dtype=torch.float32 to store all "
                    "exactly"
                )

    def reserve(self, capacity: int) -> None:
        """Make room for ``capacity`` tokens per sequence: the content moves into new buffers, once. Sequences
        that shared cells then have copies. An error leaves everything unchanged.
        """
        if capacity <= self.options.capacity:
            return
        self._rebuild(replace(self.options, capacity=capacity))

    def look_back(self, tokens: int) -> bool:
        """Make windows keep at least ``tokens`` beyond what they show: the content moves, as in
        ``reserve``.
        """
        lookback = self.options.lookback
        if tokens > lookback and any(self.family.kept(kind) is not None for kind in self.family.caches):
            self._rebuild(replace(self.options, lookback=max(tokens, 2 * lookback)))
            return True
        return False

    def _rebuild(self, options: CacheOptions) -> None:
        if self.given_away:
            raise NotSupportedError(
                f"HFCache: capacity={options.capacity} and lookback={options.lookback} are needed; those of "
                f"an HFPrefixCache stay {self.options.capacity} and {self.options.lookback}"
            )
        if self.bound:
            taken = self.sequences.taken
            if options.grow:  # also for sequences that shared cells
                cache: Any = self.family.all
                longest = max(map(cache.offset, taken), default=0)
                options = replace(options, capacity=max(options.capacity, longest))
            family = self._new_family(options, self.sequences.max_sequences)
            try:
                for seq in taken:
                    self.put_back(family, seq, self.family.all.snapshot(seq))
            except OrderError as error:
                raise OrderError(
                    f"HFCache: capacity={options.capacity} and lookback={options.lookback} need new buffers, "
                    "and the last pass, of this cache or of a fork, did not reach all layers; call crop(-n) "
                    "with the n tokens of that pass, or reset(), on that cache"
                ) from error
            self.family, self.current, self.views = family, None, {}
            self.sequences.cache = family.all
        self.options = options

    def read(self, reading: DenseBatch, layer: int, key: torch.Tensor, value: torch.Tensor) -> Pair:
        """K and V of a layer, with the dtypes and on the device of ``key`` and ``value``."""
        keys, values = reading.read(self.places.contexts.get(layer) or self.ctx.layer(layer), layer)
        pair = self.bridge.to_torch(keys, key), self.bridge.to_torch(values, value)
        return (pair[0].contiguous(), pair[1].contiguous()) if self._in_one_piece else pair

    def learn_views(self, kind: Kind, layer: int, key: torch.Tensor) -> None:
        """After a ``put``, enable ``step`` for the layer if possible."""
        known = self.views.get(layer)
        if layer in self.views and (known is None or known.cells.current):
            return
        shared = self.aliased(layer, key) and not self._in_one_piece
        cells = self.family.caches[kind].layer_cells(layer) if shared else None
        self.views[layer] = None if cells is None else LayerViews(cells, self.bridge)

    def aliased(self, layer: int, key: torch.Tensor) -> bool:
        """Whether reads for ``key`` alias the cache's memory if the cells allow it."""
        return self.dtype.plain is self.activations and self.bridge.aliases(self.ctx.layer(layer), key)

    def place(self, layer: int, key: torch.Tensor) -> ml.Context:
        """The context of a layer's K and V like ``key``: see ``Places``."""
        context = self.places.contexts.get(layer)
        if context is not None:
            return context
        has_data = any(layer in cache.storage.buffers for cache in self.family.caches.values())
        return self.places.learn(layer, key.device, has_data)

    def know(self, devices: Mapping[int, torch.device]) -> None:
        """Place layers that store nothing yet, and their indexers with them."""
        plan = self.plan
        beside = {plan.part(i): devices[i] for i in plan.indexed if i in devices}
        for i, compression in plan.compressed.items():
            parts = [part for n in range(len(compression.names)) for part in plan.parts(i, n)]
            beside |= dict.fromkeys(parts, devices[i]) if i in devices else {}
        self.places.know({**devices, **beside})

    def settle_places(self) -> None:
        """Move content restored before the devices of the layers were known."""
        if self.places.moving and not self.given_away:
            self.places.settle()
            self._rebuild(self.options)

    def put_back(self, family: ModelCaches, seq: int, snapshot: Snapshot) -> None:
        """Restore a sequence. Raises InvalidRangeError for a snapshot of another kind of cache."""
        cache: Any = family.all
        if not cache.restore(seq, snapshot):
            raise InvalidRangeError("HFCache: the snapshot comes from a different kind of cache")

    @property
    def given_away(self) -> bool:
        """Whether another object owns the sequences."""
        return self.bound and self.sequences.given_away

    def check_free(self, count: int) -> None:
        """Raise InvalidSequenceError unless ``count`` sequences are free."""
        free = self.sequences.free
        if count > free:
            raise InvalidSequenceError(
                f"HFCache: {count} sequences are needed and {free} are free; pass a larger max_sequences="
            )

    def take(self, count: int) -> list[SharedSequence]:
        """The lowest ``count`` empty sequences. Raises InvalidSequenceError if fewer are free."""
        self.check_free(count)
        taken = [self.sequences.hold() for _ in range(count)]
        for one in taken:
            self.sequences.occupy(one)
        return taken

    def fork(self, claim: SharedSequence, length: int) -> SharedSequence:
        """A sequence with the content of ``claim``, without copying."""
        self.current = None
        copy = self.sequences.fork(claim, length)
        self.sequences.occupy(copy)
        return copy

    def remove(self, sequences: Sequence[int], begin: int, end: int | None = None) -> None:
        """Remove ``[begin, end)`` of all sequences or, if one refuses, of none."""
        changes = [self.family.all.prepare_remove(seq, begin, end) for seq in sequences]
        for change in changes:
            change()
        self.current = None

    def check_current(self, own: ForwardPass | None) -> None:
        if self.current is None or self.current is not own:
            raise KVCacheError(
                "HFCache: another fork of this cache began a pass, or its rows changed, before this pass "
                "had reached all layers; one forward pass at a time"
            )

    def make_given(self, own: ForwardPass | None) -> None:
        """Create a pass's deferred K and V that are still referenced, before the memory they are read from
        changes. Only some models return them.
        """
        if own is not None and own is self.current:
            for reference in own.deferred:
                if (kept := reference()) is not None:
                    kept.resolve()
