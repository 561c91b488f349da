"""The caches behind the prompt caches of one model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import mlx.core as mx

import ml
from kvcache.cache import CacheDType, InvalidRangeError, check_whole
from kvcache.integrations.conversations import check_known
from kvcache.integrations.mlx_lm.attention import (
    Bystander,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    attend_by_entries,
)
from kvcache.integrations.mlx_lm.calls import takes_one_length, told_by
from kvcache.integrations.mlx_lm.codes import keep_codes
from kvcache.integrations.mlx_lm.layer_cache import CacheList, LayerCache
from kvcache.integrations.mlx_lm.layers import Attention, Layer, Recurrent, Several, layers_of
from kvcache.integrations.mlx_lm.locking import PoolLock
from kvcache.integrations.mlx_lm.loops import keep_prompt_caches
from kvcache.integrations.mlx_lm.padding import keep_whole_steps, with_padding_told
from kvcache.integrations.mlx_lm.recurrent import ArraysCache, CompressedCache
from kvcache.integrations.mlx_lm.rows import BatchRows
from kvcache.integrations.mlx_lm.sequences import SequencePool
from kvcache.integrations.mlx_lm.storage import Storage

__all__ = ["CachePool", "PoolOptions", "called_by", "entries_of", "layers_tried", "prompt_cache_of"]

_DTYPES = {mx.float32: ml.DType.F32, mx.float16: ml.DType.F16, mx.bfloat16: ml.DType.BF16}

PREFILL = 2048
"""Tokens per row of the largest pass that is expected: mlx-lm's own ``prefill_step_size``."""


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """How a CachePool stores what it is given.

    Up to ``max_sequences`` rows, copies and finished conversations live at once, of up to ``capacity`` tokens
    each. ``dtype`` is what K and V are stored in (None: what the model computes), as ``Cache.init`` takes it:
    ``ml.DType.Q8_0``, "AFFINE8_64" or a pair, say, or a dtype of MLX. ``rollback`` is how many tokens sliding
    layers keep beyond their windows, so that they can be trimmed.
    ``checkpoints`` of the states of recurrent layers are kept per sequence, one every
    ``checkpoint_interval`` tokens, for ``rewind``. ``max_batch`` is the largest number of tokens in a
    pass, of all rows together (None: 2048 per sequence). ``max_kv_size`` is mlx-lm's, at least 5: a layer
    keeps the first 4 tokens for good and the last ``max_kv_size - 4``, and no row is too long. A query in a
    pass of several tokens sees what it sees with mlx-lm's RotatingKVCache, which is not quite that (see
    ``masks.seen_beside_kept``). ``backend`` is an open one of MLX (None: a new one).
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

    @classmethod
    def of(cls, op: str, options: Mapping[str, Any]) -> PoolOptions:
        """Of what was given by name. InvalidRangeError for a name or a size that makes no sense."""
        check_known(op, options, [field.name for field in fields(cls)])
        found = cls(**options)
        for name, least in _LEAST.items():
            size = getattr(found, name)
            if size is not None:
                check_whole(op, name, size, least)
        return found


_LEAST = {
    "capacity": 1, "max_sequences": 1, "rollback": 0, "checkpoints": 0, "checkpoint_interval": 1,
    "max_batch": 1,
}  # fmt: skip


class CachePool:
    """Preallocated caches for the layers of ``model``, shared by all prompt caches made of it.

    ``model`` is one of mlx-lm's, or the layers themselves. The options are those of ``PoolOptions``.

    The ``__call__`` of the model's class is put in a function that holds the pool's lock: threads with a
    prompt cache each wait for one another, call by call. Other things done to prompt caches wait too. A pool
    made from a list of layers is for one thread at a time. The function also tells what a model does not tell
    its entries itself: how many tokens a pass has (Mamba 1), or rows apart (Llama 4).

    Raises NotSupportedError for a model with layers that there is no cache for here, and for ``max_kv_size``
    of a model that says itself what its layers keep, for which mlx-lm does not use it.
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
                f"CachePool: max_kv_size={max_kv_size} of a list of layers, which say it themselves: "
                f"Attention(window={max_kv_size}, keep=4)"
            )
        layers, one_length = list(model) if listed else layers_of(model, max_kv_size, capacity), False
        if max_kv_size is not None:  # of less, the caches would keep everything, and no more than that
            capacity = max(capacity, max_kv_size + max(rollback, 1))
        self.backend = ml.open_backend("mlx") if backend is None else backend
        self._owns_backend = backend is None
        keep_whole_steps()
        if not listed:
            layers, one_length = layers_tried(model, layers, self.backend)
        ctx = self.backend.new_context()
        self.storage = Storage(
            layers, ctx, rollback, asked.checkpoints, asked.checkpoint_interval, one_length
        )
        largest = max_sequences * min(capacity, PREFILL) if asked.max_batch is None else asked.max_batch
        self.storage.init(self.backend, _stored_dtype(asked.dtype), max_sequences, capacity, largest)
        caches = self.storage.caches
        if not listed:
            called_by(model, self.storage)
        keep_prompt_caches()
        keep_codes()
        self.sequences = SequencePool(self.storage, max_sequences, largest if caches.forgets else None)

    def __repr__(self) -> str:
        return f"<CachePool, free sequences: {self.free_sequences}; {self.cache!r}>"

    @property
    def cache(self) -> Any:
        """The cache of all layers; what is asked of sequences is asked of it."""
        return self.storage.cache

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return int(self.cache.nbytes)

    @property
    def free_sequences(self) -> int:
        """How many of ``max_sequences`` nobody holds."""
        with self.lock:
            return self.sequences.free

    @property
    def room(self) -> float:
        """How many tokens all prompt caches may hold together; infinity where only windows are kept."""
        return self.sequences.room

    @property
    def lock(self) -> PoolLock:
        """Held by who uses the pool: enter it to do several things before another thread does anything."""
        return self.sequences.lock

    def make_prompt_cache(self) -> list[Any]:
        """An empty prompt cache: an entry for each layer, as mlx-lm's ``make_prompt_cache`` gives them."""
        with self.lock:
            return self.prompt_cache_of(BatchRows.empty(self.sequences))

    def prompt_cache_of(self, rows: BatchRows) -> list[Any]:
        """The entries of a prompt cache of these rows."""
        return prompt_cache_of(self.storage, rows)

    def clear(self) -> None:
        """Let the conversations go that ``LRUPromptCache`` s keep, once no other thread uses the pool."""
        with self.lock:
            while self.sequences.relieve():
                pass

    def close(self) -> None:
        """Drop all tensors; prompt caches of this pool cannot be used any more."""
        with self.lock:
            self.cache.close()
            if self._owns_backend:
                self.backend.close()


def layers_tried(
    model: Any, layers: list[Layer | Several], backend: ml.Backend
) -> tuple[list[Layer | Several], bool]:
    """The layers of ``model``, and whether it takes all rows for ones of one length.

    Of those with states it is tried, on ``backend``, whether the model keeps padding out of them.
    """
    if takes_one_length(model):
        return layers, True
    return with_padding_told(
        model, layers, lambda x: CachePool(x, capacity=32, max_sequences=4, backend=backend)
    ), False


def called_by(model: Any, storage: Storage) -> None:
    """Let the calls of ``model`` tell ``storage`` what its layers do not tell, and ask it for attention."""
    told_by(type(model))
    storage.calls_told = storage.wants_calls
    storage.asked = attend_by_entries(model)


def prompt_cache_of(storage: Storage, rows: BatchRows) -> list[Any]:
    """The entries of a prompt cache of these rows."""
    return entries_of(storage, lambda layer, i: _kind(layer)(rows, i))


def entries_of(storage: Storage, made: Callable[[Layer, int], Any]) -> list[Any]:
    """A prompt cache for the model's layers; ``made`` makes the entry of each, by its number."""
    each = (made(layer, i) for i, layer in enumerate(storage.layers))
    return [
        CacheList(*itertools.islice(each, len(entry.layers))) if isinstance(entry, Several) else next(each)
        for entry in storage.entries
    ]


def _stored_dtype(dtype: Any) -> Any:
    """With dtypes of MLX by what they are called here."""
    if isinstance(dtype, tuple):
        return tuple(map(_stored_dtype, dtype))
    return _DTYPES.get(dtype, dtype) if isinstance(dtype, mx.Dtype) else dtype


def _kind(layer: Layer) -> type[LayerCache]:
    if isinstance(layer, Recurrent):
        return CompressedCache if layer.names else ArraysCache
    if not layer.used:
        return Bystander
    if layer.chunked:
        return ChunkedKVCache
    return KVCache if layer.window is None else RotatingKVCache
