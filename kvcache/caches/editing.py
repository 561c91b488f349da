"""What is done to single tokens of a cache between passes: evicting them, moving their cells together."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

import ml
from kvcache.attention.observed import AttentionMass, AttentionObserver
from kvcache.cache import OrderError
from kvcache.caches.sequences import SequenceEditor

__all__ = ["EditsTokens", "EvictionPolicy"]


class EvictionPolicy(Protocol):
    """Chooses which tokens of a sequence are evicted: H2O, SnapKV, sinks and a window, or your own."""

    needs_mass: bool
    """Whether it looks at attention mass: ``cache.observer`` has to be an ``AttentionMass`` then."""

    def evicted(self, positions: np.ndarray, mass: np.ndarray | None) -> np.ndarray:
        """The positions to evict, out of the stored ``positions`` (ascending); never the last one.

        ``mass``, F64, is the attention weight that each position has had (see ``AttentionMass``).
        """


class EditsTokens:
    """The calls of a cache with cells that evict and move tokens, by its ``editor``."""

    editor: SequenceEditor
    observer: AttentionObserver | None = None
    """Called after each ``attend`` with what was attended to; for policies that evict by attention."""

    @abstractmethod
    def _bound(self, op: str) -> ml.Backend:
        """The backend; OrderError before ``init``, ClosedError after ``close``."""

    @abstractmethod
    def offset(self, seq: int) -> int:
        """The position of the next token of a sequence. Raises InvalidSequenceError."""

    @abstractmethod
    def _ending_pass(self, change: Callable[[], None]) -> Callable[[], None]:
        """The change, which ends the pass under way."""

    def prepare_evict(self, seq: int, positions: Iterable[int]) -> Callable[[], None]:
        """Make all checks of ``evict``; the returned callable does it."""
        self._bound("evict")
        self.offset(seq)  # refuses an unknown sequence
        return self._ending_pass(self.editor.prepare_evict(seq, positions))

    def evict(self, seq: int, positions: Iterable[int]) -> None:
        """Evict some tokens of a sequence in all layers; no other token moves, no key is re-encoded.

        Those that stay keep their positions, with gaps between them, and the next token belongs where it
        would have. Positions that are not stored are passed over. Where another sequence or a snapshot
        holds a token too, only this sequence lets go of it. A window that lost a token at its beginning goes
        on, and cannot be resumed or snapshotted until it has slid past it. As KV-cache compression does:
        H2O (Zhang et al., 2023), SnapKV (Li et al., 2024), kvpress.

        Raises InvalidRangeError for the sequence's last position, or one after it (``remove`` takes the end
        off), or below 0, SequenceLostError for a lost sequence.
        """
        self.prepare_evict(seq, positions)()

    def compress(self, seq: int, policy: EvictionPolicy) -> int:
        """``evict`` what ``policy`` chooses; returns the number of evicted tokens.

        Raises OrderError if the policy needs attention mass and ``observer`` is not an ``AttentionMass``.
        """
        self.offset(seq)
        table, mass = self.editor.snapshots.storage.table, None
        if policy.needs_mass:
            if not isinstance(self.observer, AttentionMass):
                raise OrderError(
                    f"compress: {type(policy).__name__} needs attention mass, and the cache's observer is "
                    f"{self.observer!r:.40}; set cache.observer = AttentionMass() before the passes it is of"
                )
            mass = self.observer.of(table, seq)
        before = table.rows[seq].positions.copy()
        self.evict(seq, np.asarray(policy.evicted(before, mass)).tolist())
        return before.size - len(table.rows[seq])

    def defrag(self) -> None:
        """Make every sequence one contiguous run of cells, with room to grow. Views become invalid."""
        backend = self._bound("defrag")
        self._ending_pass(lambda: self._defragment(backend))()

    def _defragment(self, backend: ml.Backend) -> None:
        target = self.editor.defrag()
        if self.observer is not None and target is not None:
            self.observer.moved(backend, self.editor.snapshots.storage.table, target)

    def mark_lost(self, seq: int) -> None:
        """Mark a sequence as lost: using it raises SequenceLostError until it is removed."""
        self.editor.mark_lost(seq)
