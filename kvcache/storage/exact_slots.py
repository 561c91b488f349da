"""Which cells also lie as they were put: the residual window of a cache that stores codes.

Every cell has its codes. Beside them a cell may have a **slot** in further buffers, which hold K and V as
they were put; a slot goes with its cell, whoever holds that::

    sequence 0   positions 0 1 2 3 4 5      cells 0 1 2 3 4 5      residual_length 2, sink_tokens 1
    slots                  0 - - - 2 1                             what lies in a slot is read there

The tokens of a pass take slots. When the next one begins, cells that are neither among the last nor the first
of a sequence that holds them give theirs up. No tensors here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

Array = np.ndarray
NONE = -1
"""No slot, or no cell."""


class Tokens(Protocol):
    """What a sequence holds, in ascending positions."""

    @property
    def cells(self) -> Array: ...
    def index(self, position: int) -> int:
        """How many positions are below ``position``."""


class ExactSlots:
    """The slots of one cell table, for all layers.

    A cell that is free, or was filled with codes alone, may have kept the slot of what it held: who fills
    cells from elsewhere calls ``drop``, and who reads free cells does not ask.
    """

    def __init__(self, cells: int, slots: int, last: int, first: int) -> None:
        self.slots = slots
        self._last, self._first = last, first
        self._of_cell = np.full(cells, NONE, np.int64)
        self._cell = np.full(slots, NONE, np.int64)
        """Of each slot."""
        self.changes = 0
        """Counts all that is done to the slots."""
        self._before = self._cell
        self._written = False

    @property
    def used(self) -> int:
        return int((self._cell != NONE).sum())

    def of(self, cells: Array) -> Array:
        found: Array = self._of_cell[cells]
        return found

    def retained(self, rows: Iterable[Tokens]) -> Array:
        """The cells of each row's last and first tokens, some of them twice."""
        parts = [np.zeros(0, np.int64)]
        for row in rows:
            cells, sinks = row.cells, row.index(self._first)
            parts += [cells[:sinks], cells[max(sinks, cells.size - self._last) :]]
        return np.concatenate(parts)

    def begin(self) -> None:
        """A pass begins: what ``undo`` goes back to. Its cells are not taken yet."""
        self._before, self._written = self._cell.copy(), False

    def renew(self, retained: Array, cells: Array, rows: Iterable[Tokens]) -> Array:
        """Leave slots to ``retained`` alone, and give one to each of ``cells``: which one.

        Where there are too few those of ``cells`` come first that ``rows`` retain, and then the later
        ones; the others get -1.
        """
        retained = retained[self._of_cell[retained] != NONE]
        held = self._of_cell[retained]
        self._of_cell[self._cell[self._cell != NONE]] = NONE
        self._cell[:] = NONE
        self._set(retained, held)
        self.drop(cells)  # what lay there before
        free = np.flatnonzero(self._cell == NONE)
        found = np.full(cells.size, NONE, np.int64)
        chosen = slice(None) if free.size >= cells.size else self._most_wanted(cells, free.size, rows)
        found[chosen] = free[: found[chosen].size]
        self._set(cells[chosen], found[chosen])
        return found

    def _most_wanted(self, cells: Array, count: int, rows: Iterable[Tokens]) -> Array:
        """Which of ``cells`` get a slot, ascending."""
        wanted = np.isin(cells, self.retained(rows))
        return np.sort(np.argsort(wanted, kind="stable")[cells.size - count :])

    def note_write(self) -> None:
        """The slots that ``renew`` gave are being written: what lay there before is gone."""
        self._written = True

    def undo(self) -> None:
        """Go back to the last ``begin``; a slot that was given anew and written since is nobody's."""
        before, now = self._before, self._cell
        if self._written:
            before = np.where((now == NONE) | (now == before), before, NONE)
        self.load(before)

    def save(self) -> Array:
        return self._cell.copy()

    def load(self, saved: Array) -> None:
        self._of_cell[self._cell[self._cell != NONE]] = NONE
        self._cell[:] = NONE
        slots = np.flatnonzero(saved != NONE)
        self._set(saved[slots], slots)

    def drop(self, cells: Array) -> None:
        """Cells get other content: what lies in their slots is nobody's."""
        self.changes += 1
        slots = self._of_cell[cells]
        self._cell[slots[slots != NONE]] = NONE
        self._of_cell[cells] = NONE

    def move(self, target: Array) -> None:
        """Cells are renamed: cell i is ``target[i]`` now, and none if that is -1."""
        slots = np.flatnonzero(self._cell != NONE)
        moved = target[self._cell[slots]]
        self._of_cell[:] = NONE
        self._cell[:] = NONE
        self._set(moved[moved != NONE], slots[moved != NONE])

    def _set(self, cells: Array, slots: Array) -> None:
        self.changes += 1
        self._cell[slots] = cells
        self._of_cell[cells] = slots
