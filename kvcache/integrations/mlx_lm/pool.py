"""The caches behind the prompt caches of one model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

import ml
from kvcache.cache import InvalidRangeError
from kvcache.integrations.conversations import invariant_config
from kvcache.integrations.mlx_lm.attention import (
    Bystander,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    attend_by_entries,
)
from kvcache.integrations.mlx_lm.calls import takes_one_length, told_by
from kvcache.integrations.mlx_lm.codes import keep_codes
from kvcache.integrations.mlx_lm.layer_cache import CacheList, LayerCache
from kvcache.integrations.mlx_lm.layers import (
    Attention,
    Layer,
    Recurrent,
    Several,
    computes_over_groups,
    layers_of,
)
from kvcache.integrations.mlx_lm.locking import PoolLock
from kvcache.integrations.mlx_lm.loops import keep_prompt_caches
from kvcache.integrations.mlx_lm.padding import keep_whole_steps, with_padding_told
from kvcache.integrations.mlx_lm.recurrent import ArraysCache, CompressedCache
from kvcache.integrations.mlx_lm.rows import BatchRows
from kvcache.integrations.mlx_lm.sequences import SequencePool
from kvcache.integrations.mlx_lm.storage import PoolOptions, Storage

__all__ = ["CachePool", "PoolOptions", "called_by", "entries_of", "layers_tried", "prompt_cache_of"]

_DTYPES = {mx.float32: ml.DType.F32, mx.float16: ml.DType.F16, mx.bfloat16: ml.DType.BF16}

PREFILL = 2048
"""The expected tokens per row of the largest pass: mlx-lm's own ``prefill_step_size``."""


class CachePool:
    """Preallocated caches for the layers of ``model``, shared by all prompt caches made of it.

    ``model`` is a model of mlx-lm, or a list of layers. The options are those of ``PoolOptions``.

    The ``__call__`` of the model's class is wrapped to hold the pool's lock: threads with separate prompt
    caches wait for one another, call by call, as do all other operations on prompt caches. A pool made from a
    list of layers supports one thread at a time. The wrapper also passes on what some models do not tell
    their entries: the number of tokens of a pass (Mamba 1), or which rows differ (Llama 4).

    Raises NotSupportedError for a model with unsupported layers, and for ``max_kv_size`` with a model that
    has its own ``make_cache``, for which mlx-lm ignores it.
    """

    def __init__(self, model: Any, **options: Any) -> None:
        asked = PoolOptions.of("CachePool", options)
        capacity, max_sequences, rollback = asked.capacity, asked.max_sequences, asked.rollback
        max_kv_size, backend = asked.max_kv_size, asked.backend
        listed = isinstance(model, Sequence) and not isinstance(model, str)
        if not (
            callable(model) or (listed and all(isinstance(x, (Attention, Recurrent, Several)) for x in model))
        ):
            raise InvalidRangeError(
                f"CachePool: model is a {type(model).__name__}; it must be the model, the first of what "
                "mlx_lm.load returns, or a list of layers (Attention, Recurrent, Several)"
            )
        if listed and max_kv_size is not None:
            raise InvalidRangeError(
                f"CachePool: max_kv_size={max_kv_size} with a list of layers; set it in the layers instead: "
                f"Attention(window={max_kv_size}, keep=4)"
            )
        layers, one_length = list(model) if listed else layers_of(model, max_kv_size, capacity), False
        if max_kv_size is not None:  # with a smaller capacity, the caches would keep everything and be full
            capacity = max(capacity, max_kv_size + max(rollback, 1))
        self.backend = ml.open_backend("mlx") if backend is None else backend
        self._owns_backend = backend is None
        keep_whole_steps()
        if not listed:
            layers, one_length = layers_tried(model, layers, self.backend)
        ctx = self.backend.new_context()
        self.storage = Storage(layers, ctx, asked, one_length)
        largest = max_sequences * min(capacity, PREFILL) if asked.max_batch is None else asked.max_batch
        if asked.batch_invariant:
            self.storage.cache.set_config(invariant_config(self.backend))
        self.storage.init(self.backend, _stored_dtype(asked.dtype), max_sequences, capacity, largest)
        caches, groups = self.storage.caches, self.storage.groups
        self.storage.saves_groups = groups is not None and (
            listed or computes_over_groups(model, self.storage.layers, *groups)
        )
        if not listed:
            called_by(model, self.storage)
        keep_prompt_caches()
        keep_codes()
        self.sequences = SequencePool(self.storage, max_sequences, largest if caches.forgets else None)

    def __repr__(self) -> str:
        return f"<CachePool, free sequences: {self.free_sequences}; {self.cache!r}>"

    @property
    def cache(self) -> Any:
        """The cache of all layers, for queries about sequences."""
        return self.storage.cache

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return int(self.cache.nbytes)

    @property
    def free_sequences(self) -> int:
        """The number of unused sequences."""
        with self.lock:
            return self.sequences.free

    @property
    def room(self) -> float:
        """The most tokens of all prompt caches together; infinity if only windows are kept."""
        return self.sequences.room

    @property
    def lock(self) -> PoolLock:
        """The pool's lock; hold it to make several calls without interference from other threads."""
        return self.sequences.lock

    def make_prompt_cache(self) -> list[Any]:
        """An empty prompt cache: an entry for each layer, as mlx-lm's ``make_prompt_cache`` gives them."""
        with self.lock:
            return self.prompt_cache_of(BatchRows.empty(self.sequences))

    def prompt_cache_of(self, rows: BatchRows) -> list[Any]:
        """The entries of a prompt cache of these rows."""
        return prompt_cache_of(self.storage, rows)

    def clear(self) -> None:
        """Drop the conversations kept by ``LRUPromptCache``, once no other thread uses the pool."""
        with self.lock:
            while self.sequences.relieve():
                pass

    def close(self) -> None:
        """Drop all tensors; prompt caches of this pool become unusable."""
        with self.lock:
            self.cache.close()
            if self._owns_backend:
                self.backend.close()


def layers_tried(
    model: Any, layers: list[Layer | Several], backend: ml.Backend
) -> tuple[list[Layer | Several], bool]:
    """The layers of ``model``, and whether it assumes rows of one length. For layers with states, the model
    is run on ``backend`` to test whether padding affects them.
    """
    if takes_one_length(model):
        return layers, True
    return with_padding_told(
        model, layers, lambda x: CachePool(x, capacity=32, max_sequences=4, backend=backend)
    ), False


def called_by(model: Any, storage: Storage) -> None:
    """Make the calls of ``model`` announce their shapes to ``storage``, and use its attention."""
    told_by(type(model))
    storage.calls_told = storage.wants_calls
    storage.asked = attend_by_entries(model)


def prompt_cache_of(storage: Storage, rows: BatchRows) -> list[Any]:
    """The entries of a prompt cache of these rows."""
    return entries_of(storage, lambda layer, i: _kind(layer, storage.saves_groups)(rows, i))


def entries_of(storage: Storage, made: Callable[[Layer, int], Any]) -> list[Any]:
    """A prompt cache for the model's layers; ``made`` creates each entry from its number."""
    each = (made(layer, i) for i, layer in enumerate(storage.layers))
    return [
        CacheList(*itertools.islice(each, len(entry.layers))) if isinstance(entry, Several) else next(each)
        for entry in storage.entries
    ]


def _stored_dtype(dtype: Any) -> Any:
    """The storage format, with MLX dtypes replaced by ours."""
    if isinstance(dtype, tuple):
        return tuple(map(_stored_dtype, dtype))
    return _DTYPES.get(dtype, dtype) if isinstance(dtype, mx.Dtype) else dtype


def _kind(layer: Layer, saves_groups: bool) -> type[LayerCache]:
    if isinstance(layer, Recurrent):
        return CompressedCache if layer.names else ArraysCache
    if not layer.used:
        return Bystander
    if layer.chunked:
        return ChunkedKVCache
    if layer.window is not None:
        return RotatingKVCache
    return QuantizedKVCache if saves_groups and not layer.keys_only else KVCache
