"""Evicting tokens from anywhere in a sequence, without moving those that stay."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable

import ml
from kvcache.caches.sequences import SequenceEditor

__all__ = ["EvictsTokens"]


class EvictsTokens:
    """The calls of a cache with cells that evict, by its ``editor``."""

    editor: SequenceEditor

    @abstractmethod
    def _bound(self, op: str) -> ml.Backend:
        """The backend; OrderError before ``init``, ClosedError after ``close``."""

    @abstractmethod
    def offset(self, seq: int) -> int:
        """Where the next token of a sequence belongs. InvalidSequenceError for one that is none."""

    @abstractmethod
    def _ending_pass(self, change: Callable[[], None]) -> Callable[[], None]:
        """The change, which ends the pass under way."""

    def prepare_evict(self, seq: int, positions: Iterable[int]) -> Callable[[], None]:
        """Check all that ``evict`` may refuse; the callable returned then does it."""
        self._bound("evict")
        self.offset(seq)  # refuses an unknown sequence
        return self._ending_pass(self.editor.prepare_evict(seq, positions))

    def evict(self, seq: int, positions: Iterable[int]) -> None:
        """Forget some tokens of a sequence, in all layers; no other moves, and no key is re-encoded.

        Those that stay keep their positions, with gaps between them, and the next token belongs where it
        would have. Positions that are not stored are passed over. Where another sequence or a snapshot
        holds a token too, only this sequence lets go of it. A window that lost a token at its beginning goes
        on, and cannot be resumed or snapshotted until it has slid past it. As KV-cache compression does:
        H2O (Zhang et al., 2023), SnapKV (Li et al., 2024), kvpress.

        Raises InvalidRangeError for the sequence's last position, or one after it (``remove`` takes the end
        off), or below 0, SequenceLostError for a lost sequence.
        """
        self.prepare_evict(seq, positions)()
