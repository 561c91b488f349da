"""The caches behind the prompt caches of one model, and which sequence belongs to whom.

Every prompt cache of a pool is a few sequences of the same kvcache caches. A copy shares the sequence
of its original until one of the two is written; the writer then takes a sequence of its own, which
shares the cells (``copy_prefix``). A sequence that nobody holds any more is emptied and used again.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import ml
from kvcache.cache import CacheFullError, InvalidRangeError, KVCacheError, OrderError
from kvcache.integrations.mlx_lm.attention import Bystander, KVCache, RotatingKVCache
from kvcache.integrations.mlx_lm.entries import Entry
from kvcache.integrations.mlx_lm.layers import Layer, Recurrent, layers_of
from kvcache.integrations.mlx_lm.passes import Pass
from kvcache.integrations.mlx_lm.recurrent import ArraysCache
from kvcache.integrations.mlx_lm.rows import Rows
from kvcache.integrations.mlx_lm.storage import Storage

__all__ = ["CachePool", "Held", "SequencesTakenError"]

PREFILL = 2048
"""Tokens per row of the largest pass that is expected: mlx-lm's own ``prefill_step_size``."""


class SequencesTakenError(KVCacheError, RuntimeError):
    """All sequences of a pool are held by prompt caches."""


class Held:
    """A sequence, shared by all who claim it; ``seq`` is None until something is stored."""

    __slots__ = ("_retired", "claims", "seq")

    def __init__(self, retired: list[int], seq: int | None = None) -> None:
        self._retired = retired
        self.seq = seq
        self.claims = 0

    def release(self) -> None:
        """Give up one claim; with the last one the sequence may be used again."""
        self.claims -= 1
        if not self.claims and self.seq is not None:
            self._retired.append(self.seq)  # emptied later: this may run in the middle of a pass
            self.seq = None


class CachePool:
    """Preallocated caches for the layers of ``model``, shared by all prompt caches made of it.

    ``model`` is one of mlx-lm's, or the layers themselves. Up to ``max_sequences`` rows, copies and
    finished conversations live at once, of up to ``capacity`` tokens each. ``dtype`` is what K and V are
    stored in (None: what the model computes), ``ml.DType.Q8_0`` and ``Q4_0`` too. ``rollback`` is how many
    tokens can always be trimmed from sliding layers. ``checkpoints`` of the states of recurrent layers
    are kept per sequence, one every ``checkpoint_interval`` tokens, for :func:`rewind`. ``max_batch`` is
    the largest number of tokens in a pass, of all rows together (None: 2048 per sequence).

    Raises NotSupportedError for a model with layers that there is no cache for here.
    """

    def __init__(
        self,
        model: Any,
        *,
        capacity: int = 4096,
        max_sequences: int = 1,
        dtype: ml.DType | None = None,
        rollback: int = 64,
        checkpoints: int = 4,
        checkpoint_interval: int = 256,
        max_batch: int | None = None,
        backend: ml.Backend | None = None,
    ) -> None:
        if rollback < 0:
            raise InvalidRangeError(f"CachePool: rollback={rollback}; it is >= 0")
        self.rollback, self.capacity, self.max_sequences = rollback, capacity, max_sequences
        layers = list(model) if isinstance(model, Sequence) else layers_of(model)
        self.backend = ml.open_backend("mlx") if backend is None else backend
        self._owns_backend = backend is None
        self.storage = Storage(layers, self.backend.new_context(), rollback, checkpoints, checkpoint_interval)
        self.tells_rows_apart = all(not isinstance(layer, Recurrent) or layer.masked for layer in layers)
        """Whether rows may be fed together where some are padded, or begin while others go on."""
        self.keepers: weakref.WeakSet[Any] = weakref.WeakSet()
        """mlx-lm's ``LRUPromptCache`` s that keep prompt caches of this pool."""
        self.current: Pass | None = None
        """The pass that was begun last."""
        self._free = list(range(max_sequences))[::-1]
        self._retired: list[int] = []
        largest = max_sequences * min(capacity, PREFILL) if max_batch is None else max_batch
        self.storage.init(self.backend, dtype, max_sequences, capacity, largest)
        self.room = min((cache.cells for cache in self.storage.kept_whole), default=math.inf)
        """How many tokens all prompt caches may hold together; infinity where only windows are kept."""
        self.largest_pass = largest if self.storage.forgets else None
        """How many tokens a pass may have, of all its rows; None: as many as there is room for."""

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
        """How many sequences nobody holds."""
        return len(self._free) + len(self._retired)

    def make_prompt_cache(self) -> list[Any]:
        """An empty prompt cache: an entry for each layer, as mlx-lm's ``make_prompt_cache`` gives them."""
        rows = Rows.empty(self)
        return [_kind(layer)(rows, i) for i, layer in enumerate(self.storage.layers)]

    def close(self) -> None:
        """Drop all tensors; prompt caches of this pool cannot be used any more."""
        self.cache.close()
        if self._owns_backend:
            self.backend.close()

    # Sequences.

    def hold(self) -> Held:
        """A claimable sequence with nothing in it, which takes up no room yet."""
        return Held(self._retired)

    def reclaim(self) -> None:
        """Empty the sequences that nobody holds any more."""
        while self._retired:
            seq = self._retired.pop()
            self.cut(seq, 0)
            self._free.append(seq)

    def cut(self, seq: int, length: int) -> None:
        """Keep the first ``length`` tokens of a sequence."""
        self.current = None
        self.cache.remove(seq, length)

    def relieve(self) -> bool:
        """Let the oldest conversation go that an ``LRUPromptCache`` keeps; False where none is kept."""
        keeper = next((keeper for keeper in self.keepers if len(keeper)), None)
        if keeper is not None:
            keeper.trim_to(n_sequences=len(keeper) - 1)
            self.reclaim()
        return keeper is not None

    def make_way(self, held: Held) -> None:
        """Let kept conversations go until ``held`` can be written, or a copy of it."""
        while (held.claims > 1 or held.seq is None) and not self.free_sequences and self.relieve():
            pass

    def _take(self) -> int:
        self.reclaim()
        if not self._free:
            raise SequencesTakenError(
                f"start_forward: all {self.max_sequences} sequences of the pool are held; drop a prompt "
                "cache, or make the pool with a larger max_sequences (rows of batches, copies that are "
                "written, and prompt caches that are kept take one each)"
            )
        return self._free.pop()

    def occupy(self, held: Held) -> None:
        """Give ``held`` a sequence, where it has none."""
        if held.seq is None:
            held.seq = self._take()

    def fork(self, held: Held, length: int) -> Held:
        """A sequence of one's own that shares the first ``length`` tokens of ``held``."""
        new = self.hold()
        if held.seq is not None and length:
            seq = self._take()
            self.current = None
            try:
                self.cache.copy_prefix(held.seq, seq, length)
            except BaseException:
                self._free.append(seq)
                raise
            new.seq = seq
        return new

    # Passes.

    def begin(self, new: Pass) -> None:
        """Find cells for the tokens of ``new``, whose rows have their sequences."""
        self.current = None
        batch, limit = new.batch(), self.largest_pass
        while True:
            try:
                self.cache.start_forward(self.storage.ctx, batch)
                break
            except CacheFullError:
                if (limit is not None and len(batch) > limit) or not self.relieve():
                    raise
        self.current = new

    def undo_unwritten(self) -> None:
        """Take back a pass that was begun for its mask and then not carried out."""
        current = self.current
        if current is not None and not current.written and not current.undone:
            self.cache.undo_forward()
            current.undone = True
            self.current = None

    def check_current(self, one: Pass) -> None:
        if one is not self.current:
            raise OrderError(
                "update: another prompt cache of this pool was used in the middle of this one's pass; "
                "a model runs through all its layers with one prompt cache"
            )


def _kind(layer: Layer) -> type[Entry]:
    if isinstance(layer, Recurrent):
        return ArraysCache
    if not layer.used:
        return Bystander
    return KVCache if layer.window is None else RotatingKVCache
