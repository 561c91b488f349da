"""What a pass reads where an attention mask hides some of what is stored, as padding is."""

from __future__ import annotations

import copy

import numpy as np

from kvcache.attention.batch import SequenceTokens
from kvcache.attention.forward_pass import ForwardPass
from kvcache.storage.cell_table import Row

__all__ = ["goes_on", "hide"]


def goes_on(before: np.ndarray | None, shown: np.ndarray | None) -> bool:
    """Whether the mask of a pass is that of the one before, and shows what is new; None: all is shown."""
    if before is None or shown is None:
        return before is shown
    held = before.shape[1]
    return np.array_equal(shown[:, :held], before) and bool(shown[:, held:].all())


def hide(forward: ForwardPass, shown: np.ndarray, blind: np.ndarray | None) -> None:
    """Let a pass over rows side by side, not read yet, read what ``shown`` (rows, positions) shows.

    It reads from a table without what is hidden. New tokens that see nothing, which ``blind`` (rows, tokens)
    names, read some cell: every query has to read one.
    """
    table, groups, unseeing = copy.copy(forward.table), [], []
    table.rows = [*table.rows]
    for group in forward.groups:
        i, row = group.first_token // len(group), table.rows[group.seq]
        visible = shown[i][row.positions]
        if not visible.all():
            rest = table.rows[group.seq] = Row()
            rest.assign(row.positions[visible], row.cells[visible])
        if blind is not None and blind[i].any():
            seeing, tokens = ~blind[i], group.indices()
            unseeing.append(tokens[blind[i]])
            if not seeing.any():
                continue
            group = SequenceTokens(group.seq, group.positions[seeing], tokens[seeing])
        groups.append(group)
    if unseeing:
        queries, one = np.concatenate(unseeing), Row()
        cell = forward.table.rows[forward.groups[0].seq].last_cell
        one.assign(np.zeros(1, np.int64), np.array([cell]))
        groups.append(SequenceTokens(len(table.rows), np.zeros(queries.size, np.int64), queries))
        table.rows.append(one)
    forward.read_table, forward.read_groups = table, groups
