"""The changes that a pass made to a cell table when it began, for undoing the pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvcache.attention.batch import SequenceTokens
from kvcache.storage.cell_table import CellTable, SavedRow


class UndoLog:
    """The rows of a pass's sequences before the pass, and the cells that were evicted to make room."""

    __slots__ = ("_evicted", "rows", "table")

    def __init__(self, table: CellTable, groups: Iterable[SequenceTokens]) -> None:
        self.table = table
        self.rows: dict[int, SavedRow] = {group.seq: table.rows[group.seq].save() for group in groups}
        """The row of each sequence before the pass."""
        self._evicted: tuple[np.ndarray, np.ndarray] | None = None
        """Cells, and the numbers (``CellTable.taken``) of their previous contents."""

    def evict(self, evictions: Sequence[tuple[int, int, int]]) -> None:
        """Evict positions ``[begin, end)`` of each (sequence, begin, end); at least one of them is stored."""
        table, rows = self.table, self.rows
        heads, middles, parts = {}, [], []
        for seq, begin, end in evictions:
            row = table.rows[seq]
            # Evicting anything but the head may write into the row's own buffers, so keep a copy.
            rows[seq] = saved = row.save_copy() if begin else row.save()
            first, stop = row.index(begin) if begin else 0, row.index(end)
            parts.append(saved[1][saved[2] + first : saved[2] + stop])
            if first:
                middles.append((seq, first, stop))
            else:
                heads[seq] = stop
        cells = parts[0] if len(parts) == 1 else np.concatenate(parts)
        self._evicted = cells, table.taken[cells]
        table.drop_heads(heads)
        for seq, first, stop in middles:
            table.drop(seq, first, stop)

    @property
    def evicts(self) -> bool:
        return self._evicted is not None

    def restore(self) -> None:
        """Restore the rows, and the numbers of the evicted cells."""
        for seq, row in self.rows.items():
            self.table.restore_row(seq, row)
        if self._evicted is not None:
            cells, numbers = self._evicted
            self.table.taken[cells] = numbers
