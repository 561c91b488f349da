"""What a pass reads where an attention mask hides some of what is stored, as padding is."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from kvcache.attention.batch import SequenceTokens
from kvcache.attention.forward_pass import ForwardPass
from kvcache.attention.segments import KeptSegments
from kvcache.storage.cell_table import CellTable, Row

__all__ = ["ShownSegments", "hide"]


class ShownSegments(KeptSegments):
    """The segments of a pass of rows side by side, without the positions that ``shown`` (rows, positions)
    hides. What those before it found serves on while rows grow by tokens that are shown."""

    def __init__(self, forward: ForwardPass, shown: np.ndarray) -> None:
        super().__init__(forward.table, forward.groups, [], [])
        self._config, self._lower, self._layers, self._shown = (
            forward.config,
            forward.lower,
            forward.layers,
            shown,
        )
        before = forward.segmented
        self._kept: KeptSegments | None = None
        if isinstance(before, ShownSegments) and before._goes_on(shown):
            self._kept = before._kept

    def _goes_on(self, shown: np.ndarray) -> bool:
        held = self._shown.shape[1]
        return np.array_equal(shown[:, :held], self._shown) and bool(shown[:, held:].all())

    def next(self, table: CellTable, groups: Sequence[SequenceTokens]) -> KeptSegments:
        kept = None if self._kept is None else self._kept.next(table, groups)
        if kept is None:
            layer = next(iter(self._layers.values()))
            worth = max(1, self._config.call_bytes // layer.bytes_per_cell)
            seen = _without_hidden(table, groups, self._shown)
            kept = KeptSegments.find(seen, groups, self._lower, frozenset(), worth)
        self._kept, self.found = kept, kept.found
        return self


def hide(forward: ForwardPass, shown: np.ndarray | None) -> None:
    """Let a pass that has read nothing yet read what ``shown`` shows; None: all."""
    if shown is not None:
        forward.segmented = ShownSegments(forward, shown)
    elif isinstance(forward.segmented, ShownSegments):
        forward.segmented = None


def _without_hidden(table: CellTable, groups: Sequence[SequenceTokens], shown: np.ndarray) -> CellTable:
    """The table as it would be without the hidden positions in the groups' rows; for reading only."""
    seen = copy.copy(table)
    seen.rows = [*table.rows]
    for group in groups:
        row = table.rows[group.seq]
        visible = shown[group.indices()[0] // len(group)][row.positions]
        if not visible.all():
            rest = seen.rows[group.seq] = Row()
            rest.assign(row.positions[visible], row.cells[visible])
    return seen
