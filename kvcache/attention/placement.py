"""Cells for the tokens of a batch, taken in the cell table: metadata only, and there is room already."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcache.attention.batch import SequenceTokens
from kvcache.storage.cell_table import CellTable

TOGETHER = 16
"""Sequences with a token each from which on it takes less time to place them together than one by one."""


def place(table: CellTable, groups: Sequence[SequenceTokens], tokens: int) -> int | np.ndarray:
    """Take a cell for each of ``tokens`` tokens: the first cell of a run, or one per token.

    In the batch's order. The table has as many free cells, and no sequence of ``groups`` holds the positions.
    """
    if len(groups) == 1 and isinstance(groups[0].rows, slice):
        return _place_group(table, groups[0])
    cells = np.empty(tokens, dtype=np.int64)
    if len(groups) == tokens >= TOGETHER:
        groups = _place_behind(table, groups, cells)
    for group in groups:
        chosen = _place_group(table, group)
        cells[group.rows] = chosen if len(group) == 1 else group.spread(chosen)
    first = int(cells[0])
    return first if bool((cells == np.arange(first, first + tokens)).all()) else cells


def _place_behind(
    table: CellTable, groups: Sequence[SequenceTokens], cells: np.ndarray
) -> Sequence[SequenceTokens]:
    """Of groups of one token each those that the cell behind their sequence's last one is not free for."""
    positions = np.concatenate([group.positions for group in groups])
    chosen = table.append_each([group.seq for group in groups], positions)
    cells[[group.first_token for group in groups]] = chosen
    return [groups[number] for number in np.flatnonzero(chosen < 0).tolist()]


def _place_group(table: CellTable, group: SequenceTokens) -> int | np.ndarray:
    """Cells for a group's ascending positions, taken."""
    count = group.positions.size
    if count == 1 and (cell := table.append(group.seq, group.lowest)) is not None:
        return cell
    chosen = table.choose(group.seq, count)
    if isinstance(chosen, int):
        if group.is_run() and group.lowest > table.rows[group.seq].last:
            table.take_run(group.seq, group.lowest, chosen, count)
        else:
            table.take(group.seq, group.positions, np.arange(chosen, chosen + count))
    else:
        table.take(group.seq, group.positions, chosen)
    return chosen
