"""What is done to the tokens of a cache with cells between passes, and what its sequences hold."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable

import numpy as np

import ml
from kvcache.caches.sequences import SequenceEditor
from kvcache.storage.cell_table import CellTable


class EditsTokens:
    """The calls of a cache with cells that share, remove, evict and move its tokens, by its ``editor``."""

    editor: SequenceEditor
    _table: CellTable

    @abstractmethod
    def _bound(self, op: str) -> ml.Backend:
        """See BoundCache, as of the three below."""

    @abstractmethod
    def _check_sequence(self, op: str, seq: int) -> None: ...

    @abstractmethod
    def _check_copy(self, src_seq: int, dst_seq: int, length: int) -> None: ...

    @abstractmethod
    def _check_remove(self, seq: int, begin: int, end: int | None) -> None: ...

    @abstractmethod
    def _changed(self) -> None:
        """Sequences change: the pass under way ends, and cannot be undone any more."""

    def _ending_pass(self, change: Callable[[], None]) -> Callable[[], None]:
        def commit() -> None:
            self._changed()
            change()

        return commit

    def offset(self, seq: int) -> int:
        """One past the last stored position of a sequence: where its next token belongs; 0 if empty."""
        self._check_sequence("offset", seq)
        return self._table.rows[seq].last + 1

    def prepare_copy_prefix(self, src_seq: int, dst_seq: int, length: int) -> Callable[[], None]:
        self._check_copy(src_seq, dst_seq, length)
        return self._ending_pass(self.editor.prepare_copy_prefix(src_seq, dst_seq, length))

    def prepare_remove(self, seq: int, begin: int, end: int | None = None) -> Callable[[], None]:
        self._check_remove(seq, begin, end)
        return self._ending_pass(self.editor.prepare_remove(seq, begin, end))

    def prepare_evict(self, seq: int, positions: Iterable[int]) -> Callable[[], None]:
        self._check_sequence("evict", seq)
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

    def defrag(self) -> None:
        """Make every sequence one contiguous run of cells, with room to grow. Views become invalid."""
        self._bound("defrag")
        self._ending_pass(self.editor.defrag)()

    def mark_lost(self, seq: int) -> None:
        """Mark a sequence as lost: using it raises SequenceLostError until it is removed."""
        self.editor.mark_lost(seq)

    # Looking in.

    @property
    def cells(self) -> int:
        """How many cells the cache has."""
        self._bound("cells")
        return self._table.cells

    @property
    def free_cells(self) -> int:
        """Cells that no sequence holds; snapshots in some of them are moved when the room is needed."""
        self._bound("free_cells")
        return self._table.unowned

    def held(self) -> dict[int, int]:
        """How many cells each sequence holds; shared ones count for each."""
        self._bound("held")
        return self._table.held()

    def positions(self, seq: int) -> np.ndarray:
        """The stored positions of a sequence, ascending (a copy)."""
        self._check_sequence("positions", seq)
        return self._table.rows[seq].positions.copy()
