"""The owners of the sequences of a pool's caches, and the current pass. Every prompt cache of a pool consists
of a few sequences of the same caches. A copy shares the sequence of its original until one of the two is
written; the writer then takes its own sequence, which shares the cells (``copy_prefix``). A sequence without
owners is emptied and reused.
"""

from __future__ import annotations

import itertools
import logging
import math
import sys
import weakref
from collections.abc import Sequence
from typing import Any

from kvcache.cache import CacheFullError, InvalidRangeError, KVCacheError, NotSupportedError, OrderError
from kvcache.integrations.mlx_lm.locking import PoolLock
from kvcache.integrations.mlx_lm.passes import ForwardPass
from kvcache.integrations.mlx_lm.storage import Storage
from kvcache.integrations.rows.sequences import Sequences, SharedSequence

__all__ = ["SequencePool", "SequencesTakenError"]

log = logging.getLogger(__name__)

_FULL = (
    "a cell holds a token of a sequence: trim, rewind or drop a prompt cache, or make the pool with a larger "
    "capacity"
)
_TOO_LARGE = (
    "a pass is too large for the sliding layers: set a smaller prefill_step_size, or make the pool with a "
    "larger max_batch"
)
_IN_TRACEBACK = (
    ". The last exception of this interactive session holds what its frames name: del sys.last_traceback, "
    "sys.last_value, sys.last_exc"
)


class SequencesTakenError(KVCacheError, RuntimeError):
    """All sequences of a pool are held by prompt caches."""


class SequencePool(Sequences):
    """The sequences of ``storage``'s caches, shared by all rows of all prompt caches of a pool.

    ``largest_pass`` is the most tokens of a pass, over all rows; None: limited by the room only.
    """

    def __init__(self, storage: Storage, max_sequences: int, largest_pass: int | None) -> None:
        super().__init__(max_sequences, storage.cache)
        self.storage, self.largest_pass = storage, largest_pass
        self.lock = PoolLock(storage.cache)
        self.keepers: weakref.WeakSet[Any] = weakref.WeakSet()
        """The ``LRUPromptCache`` objects that keep prompt caches of this pool."""
        self.current: ForwardPass | None = None
        """The last pass begun."""
        self._dropped: list[SharedSequence] = []
        """Claims released while another thread used the pool."""

    def drop(self, several: Sequence[SharedSequence]) -> None:
        """Release a claim to each. It never blocks, since garbage collection may call it in any thread."""
        if not self.lock.inner.acquire(blocking=False):
            self._dropped += several
            return
        try:
            for one in several:
                one.release()
        finally:
            self.lock.inner.release()

    def _release_dropped(self) -> None:
        while self._dropped:
            self._dropped.pop().release()

    @property
    def room(self) -> float:
        """The most tokens of all rows together; infinity if only windows are kept."""
        return min((cache.cells for cache in self.storage.caches.whole), default=math.inf)

    def fitting(self, op: str, tokens: int, more: int) -> int:
        """How many of ``more`` tokens (below 0: any number) fit into the pool after a prompt of ``tokens``.
        Logs a warning if they are fewer. Raises InvalidRangeError if the prompt leaves no room.
        """
        most = min(self.room, self.storage.longest)
        if tokens >= most:
            raise InvalidRangeError(
                f"{op}: a prompt of {tokens} tokens; the pool has room for {most}, the answer included: "
                "shorten it, or make the pool with a larger capacity or max_sequences"
            )
        if 0 <= more <= most - tokens:
            return more
        if most < math.inf:
            log.warning(
                "%s: an answer of up to %s tokens will end after %d, because the pool has no more room",
                op, more if more >= 0 else "any number of", most - tokens,
            )  # fmt: skip
            return int(most) - tokens
        return more

    @property
    def free(self) -> int:
        self._release_dropped()
        return super().free

    def check_sharing(self, op: str) -> None:
        """Refuse a second claim to a lent sequence, which its owner may pass on regardless of claims."""
        if self.given_away:
            raise NotSupportedError(
                f"{op}: the prompt cache of an MLXSession has no copies, and does not go into batches; begin "
                "another session with the same tokens, which shares what is stored"
            )

    def reclaim(self) -> None:
        self._release_dropped()
        super().reclaim()

    def cut(self, seq: int, length: int) -> None:
        self.current = None
        super().cut(seq, length)

    def fork(self, claim: SharedSequence, length: int) -> SharedSequence:
        self.current = None
        return super().fork(claim, length)

    def relieve(self) -> bool:
        """Drop the oldest conversation kept by an ``LRUPromptCache``; False if there is none."""
        keeper = next((keeper for keeper in self.keepers if len(keeper)), None)
        if keeper is not None:
            keeper.trim_to(n_sequences=len(keeper) - 1)
            self.reclaim()
        return keeper is not None

    def make_way(self, claim: SharedSequence) -> None:
        """Drop kept conversations until ``claim``, or a copy of it, can be written."""
        while (claim.claims > 1 or claim.seq is None) and not self.free and self.relieve():
            pass

    def _none_free(self, count: int) -> Exception:
        hint = "" if getattr(sys, "last_traceback", None) is None else _IN_TRACEBACK
        return SequencesTakenError(
            f"start_forward: all {self.max_sequences} sequences of the pool are held; drop a prompt "
            "cache, or make the pool with a larger max_sequences (rows of batches, copies that are "
            f"written, and prompt caches that are kept take one each){hint}"
        )

    # Passes.

    def make_room(self, tokens: int) -> None:
        """Drop kept conversations until these tokens fit; raises CacheFullError if they never do."""
        for cache in self.storage.caches.whole:
            while cache.free_cells < tokens:
                if not self.relieve():
                    stored = cache.held()
                    raise CacheFullError(tokens, cache.free_cells, stored, "update", _FULL)

    def begin(self, new: ForwardPass) -> None:
        """Find cells for the tokens of ``new``, whose rows have sequences."""
        last, self.current = self.current, None
        if new.rows == 1 or last is None or not any(last.attends.values()):
            self._line_up(new)
        batch, limit = new.batch(), self.largest_pass
        while True:
            try:
                self.storage.cache.start_forward(self.storage.ctx, batch)
                break
            except CacheFullError as error:
                large = limit is not None and len(batch) > limit
                if large or not self.relieve():
                    remedy = _TOO_LARGE if large else _FULL
                    raise CacheFullError(error.asked, error.free, error.held, "update", remedy) from error
        self.current = new

    def _line_up(self, new: ForwardPass) -> None:
        """Move the rows of ``new`` together where reading them would gather: ``get`` of one row always does,
        of several only if the caches do not ``attend``.
        """
        caches = self.storage.caches
        given = zip(new.sequences, new.before, strict=True)
        seqs = [*{seq: None for seq, before in given if seq is not None and before}]
        scattered = []
        for cache in caches.caches.values():
            rows = [cache.storage.table.rows[seq] for seq in seqs]
            starts = [row.first_cell for row in rows if len(row)]
            uneven = len({later - earlier for earlier, later in itertools.pairwise(starts)}) > 1
            if uneven or not all(row.contiguous for row in rows):
                scattered.append(cache)
        if scattered:
            caches.line_up(scattered, seqs, max(new.counts))

    def undo_unwritten(self) -> None:
        """Undo a pass that was begun for its mask but not executed."""
        current = self.current
        if current is not None and not current.written and not current.undone:
            self.storage.cache.undo_forward()
            current.undone = True
            self.current = None

    def check_current(self, one: ForwardPass) -> None:
        if one is not self.current:
            raise OrderError(
                "update: another prompt cache of this pool was used during this one's pass; a model must run "
                "all its layers with one prompt cache"
            )
