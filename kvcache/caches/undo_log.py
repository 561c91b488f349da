"""What a pass changed of a cell table when it began, to be taken back where the pass is."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvcache.storage.cell_table import CellTable, SavedRow


class UndoLog:
    """The rows of a pass's sequences as they were, and what of them was evicted to make room."""

    __slots__ = ("_evicted", "rows", "table")

    def __init__(self, table: CellTable) -> None:
        self.table = table
        self.rows: dict[int, SavedRow] = {}
        """By sequence: its row before the pass."""
        self._evicted: tuple[np.ndarray, np.ndarray] | None = None
        """Cells, and the numbers (``CellTable.taken``) of what lay there."""

    def evict(self, evictions: list[tuple[int, int, int]], sequences: Iterable[int]) -> None:
        """Note the rows of ``sequences``; drop positions ``[begin, end)`` of each (sequence, begin, end)."""
        table, rows = self.table, self.rows
        for seq in sequences:
            rows[seq] = table.save_row(seq)
        if not evictions:
            return
        for seq, begin, _ in evictions:
            # Where not the head goes the row's own buffers may be written: a copy is safe from that.
            rows[seq] = table.rows[seq].save_copy() if begin else table.save_row(seq)
        gone = {
            seq: (table.rows[seq].index(begin) if begin else 0, table.rows[seq].index(end))
            for seq, begin, end in evictions
        }
        cells = np.concatenate([table.rows[seq].cells[slice(*span)] for seq, span in gone.items()])
        self._evicted = cells, table.taken[cells]
        table.drop_heads({seq: stop for seq, (first, stop) in gone.items() if not first})
        for seq, (first, stop) in gone.items():
            if first:
                table.drop(seq, first, stop)

    @property
    def evicts(self) -> bool:
        return self._evicted is not None

    def restore(self) -> None:
        """Bring the rows, and the numbers of what was evicted, back to what they were."""
        for seq, row in self.rows.items():
            self.table.restore_row(seq, row)
        if self._evicted is not None:
            cells, numbers = self._evicted
            self.table.taken[cells] = numbers
