"""The cell table: which cell holds which position of which sequence. It contains no tensors.

A cell is one token's place in the buffers of every layer. A sequence owns cells through its row, which lists
positions in ascending order, each with the cell that holds it. Two sequences that share a prefix list the
same cells; ``references`` counts the owners of every cell, 0 if it is free::

    sequence 0   positions 0 1 2 3      cells 0 1 2 3
    sequence 1   positions 0 1 2        cells 0 1 6        (shares two, then diverges)
    references   2 2 1 1 0 0 1 0

A snapshot that has not been copied out also owns cells, through a pin: no sequence writes there.

All work is on whole arrays or on a batch's tokens, never a Python loop over cells.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

import ml

Array = np.ndarray
SavedRow = tuple[np.ndarray, np.ndarray, int, int, bool, bool]
"""The result of ``Row.save``: buffers, head, tail, whether the cells are a run, and whether the buffers are
lent.
"""
_EMPTY = np.zeros(0, dtype=np.int64)


class Row:
    """The cells of one sequence, ordered by position; it grows at the tail and is evicted at the head.

    ``positions`` and ``cells`` are views of buffers with room to grow. Any change other than an append or a
    cut makes new buffers, so that a saved (buffers, head, tail) restores a row exactly. A row that equals a
    snapshot shares its arrays until it appends.
    """

    __slots__ = ("_cells", "_head", "_lent", "_positions", "_tail", "contiguous", "cut_off", "lost")

    def __init__(self) -> None:
        self._positions = _EMPTY
        self._cells = _EMPTY
        self._head = 0
        self._tail = 0
        self._lent = False
        """The buffers belong to a snapshot and end where the row does: an append makes new ones."""
        self.contiguous = True
        """The cells are c, c+1, c+2, ... in the order of positions."""
        self.cut_off = 0
        """The sequence's end, if what a window sees there is no longer stored; 0 otherwise."""
        self.lost = False
        """The device failed while this sequence's data was being moved."""

    def __len__(self) -> int:
        return self._tail - self._head

    @property
    def positions(self) -> Array:
        return self._positions[self._head : self._tail]

    @property
    def cells(self) -> Array:
        return self._cells[self._head : self._tail]

    @property
    def first(self) -> int:
        """The lowest position; the row must not be empty."""
        return int(self._positions[self._head])

    @property
    def last(self) -> int:
        """The highest position; -1 if the row is empty."""
        return int(self._positions[self._tail - 1]) if self._tail > self._head else -1

    @property
    def first_cell(self) -> int:
        return int(self._cells[self._head])

    @property
    def last_cell(self) -> int:
        return int(self._cells[self._tail - 1])

    def end(self) -> tuple[int, int]:
        """The highest position and its cell; (-1, -1) if the row is empty."""
        at = self._tail - 1
        return (int(self._positions[at]), int(self._cells[at])) if at >= self._head else (-1, -1)

    def span(self) -> tuple[int, int]:
        """[lowest, highest + 1) of the cells; (0, 0) if the row is empty."""
        if self._tail == self._head:
            return 0, 0
        if self.contiguous:
            return int(self._cells[self._head]), int(self._cells[self._tail - 1]) + 1
        cells = self.cells
        return int(cells.min()), int(cells.max()) + 1

    def index(self, position: int) -> int:
        """How many stored positions are below ``position``."""
        if self._tail == self._head or position > self.last:
            return self._tail - self._head
        return int(self.positions.searchsorted(position))

    def first_held(self, positions: Array) -> int | None:
        """The first of these ascending positions that is stored; None if none is."""
        if not len(self) or positions[0] > self.last:
            return None
        stored = self.positions
        places = np.searchsorted(stored, positions)
        places[places == stored.size] = 0
        both = positions[stored[places] == positions]
        return int(both[0]) if both.size else None

    def save(self) -> SavedRow:
        return self._positions, self._cells, self._head, self._tail, self.contiguous, self._lent

    def save_copy(self) -> SavedRow:
        """As ``save``, but unaffected by any later change of the row."""
        return self.positions.copy(), self.cells.copy(), 0, len(self), self.contiguous, False

    def load(self, saved: SavedRow) -> None:
        self._positions, self._cells, self._head, self._tail, self.contiguous, self._lent = saved

    def assign(self, positions: Array, cells: Array, contiguous: bool | None = None) -> None:
        """``contiguous``: whether the cells are a run, if known."""
        self._positions, self._cells = positions, cells
        self._head, self._tail, self._lent = 0, positions.size, False
        self.contiguous = is_run(cells) if contiguous is None else contiguous

    def borrow(self, positions: Array, cells: Array, contiguous: bool) -> None:
        """As ``assign``, for arrays that are shared with others."""
        self.assign(positions, cells, contiguous)
        self._lent = True

    def append_run(self, position: int, cell: int, count: int) -> None:
        """Add positions and cells that both count up, after the last position."""
        self._grow(count)
        self.contiguous = (self.contiguous and self.last_cell + 1 == cell) if len(self) else True
        tail = self._tail
        if count == 1:
            self._positions[tail] = position
            self._cells[tail] = cell
        else:
            self._positions[tail : tail + count] = np.arange(position, position + count)
            self._cells[tail : tail + count] = np.arange(cell, cell + count)
        self._tail = tail + count

    def append_behind(self, position: int, cell: int) -> None:
        """Append one position in the cell after the last one."""
        tail = self._tail
        if tail == self._positions.size:
            self._grow(1)
            tail = self._tail
        self._positions[tail] = position
        self._cells[tail] = cell
        self._tail = tail + 1

    def insert(self, positions: Array, cells: Array) -> None:
        """Add ascending positions anywhere among those stored."""
        if not len(self) or positions[0] > self.last:
            joined = np.concatenate((self.positions, positions)), np.concatenate((self.cells, cells))
        else:
            at = np.searchsorted(self.positions, positions)
            joined = np.insert(self.positions, at, positions), np.insert(self.cells, at, cells)
        self.assign(*joined)

    def cut_head(self, count: int) -> None:
        self._head += count
        self.contiguous = self.contiguous or is_run(self.cells)

    def cut_tail(self, index: int) -> None:
        """Keep the first ``index`` entries."""
        self._tail = self._head + index
        if self._lent:
            self._positions, self._cells = self._positions[: self._tail], self._cells[: self._tail]
        self.contiguous = self.contiguous or is_run(self.cells)

    def _grow(self, count: int) -> None:
        """Make room at the tail; amortized, this copies O(1) entries per token."""
        if self._tail + count <= self._positions.size:
            return
        size = max(64, 2 * (len(self) + count))
        for name in ("_positions", "_cells"):
            buffer = np.empty(size, dtype=np.int64)
            buffer[: len(self)] = getattr(self, name)[self._head : self._tail]
            setattr(self, name, buffer)
        self._head, self._tail, self._lent = 0, self._tail - self._head, False


class Pin:
    """Cells that a snapshot reads in place; it follows them through a defragmentation."""

    __slots__ = ("cells", "lost", "where")

    def __init__(self, cells: Array | slice) -> None:
        self.set_cells(cells)
        self.lost = False
        """The device failed while these cells were being moved."""

    def set_cells(self, cells: Array | slice) -> None:
        """``cells``, or a run of them."""
        self.cells: Array = numbers(cells.start, cells.stop) if isinstance(cells, slice) else cells
        self.where: Array | slice = cells if isinstance(cells, slice) else indices(cells)
        """The index that selects them from an array."""


class Arrivals:
    """Transfers from host memory into the cells of one table that nothing has waited for yet."""

    def __init__(self) -> None:
        self._under_way: list[tuple[np.ndarray, ml.PageTransfer]] = []

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def add(self, cells: np.ndarray, transfer: ml.PageTransfer) -> None:
        """Record that copies into ``cells`` have begun."""
        self._under_way.append((cells, transfer))

    def join(self, wanted: np.ndarray) -> list[tuple[np.ndarray, ml.DeviceError]]:
        """Order subsequent work after the copies into the cells for which ``wanted`` is true.

        Returns the cells of failed copies. Finished copies are forgotten, wanted or not.
        """
        waiting, self._under_way = self._under_way, []
        failed: list[tuple[np.ndarray, ml.DeviceError]] = []
        for cells, transfer in waiting:
            if not wanted[cells].any() and not transfer.done():
                self._under_way.append((cells, transfer))
                continue
            try:
                transfer.join()
            except ml.DeviceError as error:
                failed.append((cells, error))
        return failed


class CellTable:
    """The rows of all sequences over ``cells`` cells, and who shares which cells.

    ``blank`` marks the free cells that are known to contain zeros.
    """

    def __init__(self, cells: int, max_sequences: int) -> None:
        self.cells = cells
        self.blank: Array = np.ones(cells, dtype=bool)
        self.references = np.zeros(cells, dtype=np.int32)
        self.taken = np.zeros(cells, dtype=np.int64)
        """A number for each cell that changes whenever the cell is reused, so that its tokens can be told
        apart.
        """
        self.free = cells
        self.changes = 0
        """Counts all changes of rows and pins except the growth of a row into the cell after it."""
        self.appended = 0
        """Counts the tokens of such growth."""
        self.rows = [Row() for _ in range(max_sequences)]
        self._home = max(1, cells // max_sequences)
        self.pins: dict[int, Pin] = {}
        self._dropped: deque[Pin] = deque()
        self._numbers = itertools.count(1)
        self.placed: tuple[int, int | Array, int] | None = None
        """The current pass, whose tokens the layers put in turn: its stamp, its cells and their number. Cells
        are the first of a run, or individual ones.
        """
        self.arrivals = Arrivals()
        """Pending copies into cells; see ``join_arrivals``."""

    def held(self) -> dict[int, int]:
        return {seq: len(row) for seq, row in self.occupied()}

    def occupied(self) -> Iterator[tuple[int, Row]]:
        return ((seq, row) for seq, row in enumerate(self.rows) if len(row))

    # Pins.

    def pin(self, cells: Array | slice) -> Pin:
        """Keep ``cells`` (distinct, each in use), or a run of them, from being reused until ``unpin``."""
        pin = Pin(cells)
        self.changes += 1
        self.references[pin.where] += 1
        self.pins[id(pin)] = pin
        return pin

    def hold(self, cells: Array) -> Pin:
        """Pin free cells into which data is about to be written."""
        self.free -= cells.size
        pin = self.pin(cells)
        self._number(pin.where)
        return pin

    def unpin(self, pin: Pin) -> None:
        if self.pins.pop(id(pin), None) is not None:
            self._release(pin.cells, where=pin.where)

    def drop_pin(self, pin: Pin) -> None:
        """Remove ``pin`` at the next ``sweep``; safe to call from a garbage collector."""
        self._dropped.append(pin)

    def sweep(self) -> None:
        while self._dropped:
            self.unpin(self._dropped.popleft())

    def live_pins(self) -> list[Pin]:
        """The pins whose snapshots still exist; unlike ``sweep``, this changes nothing."""
        gone = {
            id(self._dropped[i]) for i in range(len(self._dropped))
        }  # a garbage collection may add to it now
        return [pin for key, pin in list(self.pins.items()) if key not in gone]

    @property
    def unowned(self) -> int:
        """The number of cells that no sequence holds: free cells, and those held only by pins."""
        if not self.pins:
            return self.free
        self.sweep()
        return self.cells - int(self.owned().sum())

    def owned(self, besides: int | None = None) -> Array:
        """For every cell, whether a sequence other than ``besides`` holds it."""
        owned = np.zeros(self.cells, dtype=bool)
        for seq, row in self.occupied():
            if seq != besides:
                owned[row.cells] = True
        return owned

    def shared(self, seq: int, cells: Array) -> bool:
        """Whether another sequence also holds one of ``cells``, which ``seq`` holds."""
        if not (self.references[cells] > 1).any():
            return False
        return bool(self.owned(besides=seq)[cells].any())

    def awaited(self, stamp: int, cells: Array) -> bool:
        """Whether a layer whose last ``put`` was in pass ``stamp`` still lacks one of ``cells`` in the
        current pass.
        """
        if self.placed is None or stamp >= self.placed[0]:
            return False
        _, where, count = self.placed
        if isinstance(where, int):
            return bool(((cells >= where) & (cells < where + count)).any())
        return bool(np.isin(cells, where).any())

    def mark_lost(self, *touched: Array) -> bool:
        """Mark every sequence and pin that owns one of these cells as lost after a device failure; returns
        whether any does.
        """
        cells = np.concatenate(touched)
        owners: list[Row | Pin] = [*(row for _, row in self.occupied()), *self.pins.values()]
        hit = [owner for owner in owners if np.isin(owner.cells, cells).any()]
        for owner in hit:
            owner.lost = True
        return bool(hit)

    def join_arrivals(self, cells: Array | None = None) -> None:
        """Order subsequent work after copies to ``cells`` and to free cells; call it before these are read,
        written or moved.

        ``cells`` None: after all copies. Cells that are read only as masked cells need no waiting. Raises
        DeviceError if copies failed into cells that have owners, which are marked as lost.
        """
        if not self.arrivals:
            return
        wanted = self.references == 0
        wanted[... if cells is None else cells] = True
        failed = [error for target, error in self.arrivals.join(wanted) if self.mark_lost(target)]
        if failed:
            raise failed[0]

    # Choosing cells.

    def choose(self, seq: int, count: int) -> int | Array:
        """Free cells for ``count`` further tokens: the first of a run, or scattered cells.

        The caller has checked that ``count`` cells are free. The first choice is a run directly after the
        sequence's last cell. The second is a run in its home (its equal share of the table): directly before
        its first cell if a window has evicted what lay there, so that the following tokens go into the cells
        evicted next, with no free cell between those in use. The last choice is a hole.
        """
        row, home = self.rows[seq], seq * self._home
        start = row.last_cell + 1 if len(row) else home
        if self._is_free(start, count):
            return start
        if len(row):
            before = row.first_cell - count
            for start in (before, home) if before > home else (home,):
                if self._is_free(start, count):
                    return start
        hole = self._largest_hole(count)
        return hole if hole is not None else np.flatnonzero(self.references == 0)[:count]

    def _is_free(self, start: int, count: int) -> bool:
        references = self.references[start : start + count]
        return references.size == count and not references.any()

    def _largest_hole(self, count: int) -> int | None:
        """Where in the largest hole to put a run of ``count`` cells, if it fits.

        A hole that begins where a sequence ends is used from its middle, so that both have room to grow.
        """
        taken = np.flatnonzero(self.references)
        edges = np.concatenate(([-1], taken, [self.cells]))
        gaps = np.diff(edges) - 1
        widest = int(gaps.argmax())
        start, room = int(edges[widest]) + 1, int(gaps[widest])
        if room < count:
            return None
        grows_here = any(row.last_cell + 1 == start for _, row in self.occupied())
        return start + (room - count) // 2 if grows_here else start

    # Changes of rows. Each keeps ``references`` and ``free`` up to date.

    def take_run(self, seq: int, position: int, cell: int, count: int) -> None:
        """Append consecutive positions from ``position``, after the last one, in a run of cells."""
        row = self.rows[seq]
        if len(row) and row.last_cell + 1 == cell:
            self.appended += count
        else:
            self.changes += 1
        row.append_run(position, cell, count)
        if count == 1:
            self.references[cell] = 1
            self._number(cell)
        else:
            self.references[cell : cell + count] = 1
            self._number(slice(cell, cell + count))
        self.free -= count

    def append(self, seq: int, position: int) -> int | None:
        """Append one token to its sequence in the cell after the last one; None if that cell is taken."""
        row = self.rows[seq]
        last, cell = row.end()
        cell += 1
        if not 0 <= last < position or cell >= self.cells or self.references[cell]:
            return None
        row.append_behind(position, cell)
        self.references[cell] = 1
        self._number(cell)
        self.free -= 1
        self.appended += 1
        return cell

    def append_each(self, seqs: Sequence[int], positions: Array) -> Array:
        """``append`` one token to each of several sequences; returns their cells, -1 if a cell is taken."""
        rows = [self.rows[seq] for seq in seqs]
        last, cells = np.array([row.end() for row in rows], dtype=np.int64).T
        cells = cells + 1
        able = (last >= 0) & (last < positions) & (cells < self.cells)
        able &= self.references[np.where(able, cells, 0)] == 0
        chosen = np.flatnonzero(able)
        ordered = np.sort(cells[chosen])
        if (ordered[1:] == ordered[:-1]).any():  # if two want the same cell, the first gets it
            chosen = chosen[np.sort(np.unique(cells[chosen], return_index=True)[1])]
        new: Array = cells[chosen]
        for number, position, cell in zip(
            chosen.tolist(), positions[chosen].tolist(), new.tolist(), strict=True
        ):
            rows[number].append_behind(position, cell)
        self.references[new] = 1
        self._number(new)
        self.free -= new.size
        self.appended += new.size
        if new.size == len(rows):
            return new
        taken = np.full(len(rows), -1)
        taken[chosen] = new
        return taken

    def take(self, seq: int, positions: Array, cells: Array) -> None:
        """Store ascending positions in free cells."""
        self.changes += 1
        self.rows[seq].insert(positions, cells)
        where = indices(cells)
        self.references[where] = 1
        self._number(where)
        self.free -= cells.size

    def share(self, src: int, dst: int, count: int) -> None:
        """Give ``dst``, which is empty, the first ``count`` entries of ``src``."""
        self.changes += 1
        source = self.rows[src]
        cells = source.cells[:count].copy()
        self.rows[dst].assign(source.positions[:count].copy(), cells)
        self.references[cells] += 1

    def adopt(self, seq: int, positions: Array, cells: Array, where: slice | Array | None = None) -> None:
        """Append positions to a row, in cells that a pin or another row already owns.

        ``where``: the result of ``indices`` for the cells, if known. An empty row shares both arrays, which
        must not be written afterwards.
        """
        self.changes += 1
        row, where = self.rows[seq], indices(cells) if where is None else where
        if len(row) or not cells.size:
            row.insert(positions, cells)
        else:
            row.borrow(positions, cells, isinstance(where, slice))
        self.references[where] += 1

    def drop(self, seq: int, start: int, stop: int) -> None:
        """Remove the entries ``[start, stop)`` of a row (indices, not positions)."""
        if start >= stop:
            return
        row = self.rows[seq]
        self._release(row.cells[start:stop])
        if start == 0:
            row.cut_head(stop)
        elif stop == len(row):
            row.cut_tail(start)
        else:
            row.assign(
                np.concatenate((row.positions[:start], row.positions[stop:])),
                np.concatenate((row.cells[:start], row.cells[stop:])),
            )

    def drop_heads(self, counts: Mapping[int, int]) -> None:
        """Remove the first entries of several rows; ``counts`` is their number by sequence."""
        rows = [(self.rows[seq], count) for seq, count in counts.items() if count]
        if len(rows) == 1:
            self._release(rows[0][0].cells[: rows[0][1]])
        elif rows:
            self._release(np.concatenate([row.cells[:count] for row, count in rows]), distinct=False)
        for row, count in rows:
            row.cut_head(count)

    def drop_some(self, seq: int, gone: Array) -> None:
        """Remove the entries of a row for which ``gone`` (BOOL, one per entry) is true."""
        row = self.rows[seq]
        self._release(row.cells[gone])
        row.assign(row.positions[~gone], row.cells[~gone])

    def stale(self, start: int, stop: int) -> Array:
        """The free cells of ``[start, stop)`` that may still contain old data."""
        free = self.references[start:stop] == 0
        return start + np.flatnonzero(free & ~self.blank[start:stop])

    def _number(self, cells: int | slice | Array) -> None:
        self.taken[cells] = next(self._numbers)

    def _release(self, cells: Array, distinct: bool = True, where: slice | Array | None = None) -> None:
        """``where``: as in ``adopt``."""
        self.changes += 1
        if cells.size == 1:
            cell = int(cells[0])
            self.blank[cell] = False
            self.references[cell] -= 1
            self.free += not self.references[cell]
            return
        times: int | Array = 1
        if not distinct:
            cells, counts = np.unique(cells, return_counts=True)
            times = counts.astype(self.references.dtype)
        where = indices(cells) if where is None else where
        self.blank[where] = False
        left = self.references[where] - times
        self.references[where] = left
        self.free += left.size - int(np.count_nonzero(left))

    def save_row(self, seq: int) -> SavedRow:
        return self.rows[seq].save()

    def restore_row(self, seq: int, saved: SavedRow) -> None:
        """Restore a row from ``save_row`` (after appends and head cuts only) or from a saved copy."""
        row = self.rows[seq]
        self._release(row.cells)
        row.load(saved)
        cells = row.cells
        self.free -= int((self.references[cells] == 0).sum())
        self.references[cells] += 1

    # Moving cells.

    def spread(self) -> Array:
        """For every cell, its target so that rows become runs with room to grow; -1 if the cell is free.

        Each row goes to its home, so that rows lie at even distances. If a row is longer than its home, or
        pins hold cells that no row has, rows are placed one after another, with the free cells distributed
        evenly after them. A shared cell goes with its first owner's row. Cells held only by pins come last.
        """
        owners: list[Row | Pin] = [*(row for _, row in self.occupied()), *self.pins.values()]
        homes = [seq * self._home for seq, _ in self.occupied()]
        seen = np.zeros(self.cells, dtype=bool)
        own = []
        for owner in owners:
            cells = owner.cells[~seen[owner.cells]]
            seen[cells] = True
            own.append(cells)
        sizes = [cells.size for cells in own]
        if max(sizes, default=0) > self._home or any(sizes[len(homes) :]):
            gaps = [self.free // max(1, len(homes))] * len(homes) + [0] * len(self.pins)
            room = [size + gap for size, gap in zip(sizes, gaps, strict=True)]
            homes = list(itertools.accumulate(room, initial=0))
        target = np.full(self.cells, -1, dtype=np.int64)
        for cells, start in zip(own, homes, strict=False):
            target[cells] = np.arange(start, start + cells.size)
        return target

    def line_of(self, seqs: Sequence[int], room: int) -> int | None:
        """The first cell of the runs of ``line_up`` for which the fewest cells move.

        None if two of the sequences share cells, or if a token of another one would have to move.
        """
        own, places, width = self._line(seqs, room)
        held, foreign = np.zeros(self.cells, dtype=bool), np.zeros(self.cells, dtype=bool)
        held[own] = True
        for seq, row in self.occupied():
            if seq not in seqs:
                foreign[row.cells] = True
        count = self.cells - width + 1
        if count < 1 or np.count_nonzero(held) < own.size:
            return None
        starts = own - places
        fits, bound = (starts >= 0) & (starts < count), foreign[own]
        staying = np.bincount(starts[fits], minlength=count)
        possible = np.bincount(starts[fits & bound], minlength=count) == np.count_nonzero(bound)
        possible &= _sums(foreign & ~held, width) == 0
        if not possible.any():
            return None
        pushed = _sums((self.references > 0) & ~held, width)
        return int(np.where(possible, staying - pushed, -self.cells - 1).argmax())

    def line_up(self, seqs: Sequence[int], room: int) -> Array | None:
        """As ``spread``, moving only what keeps these sequences from being runs at even distances, each with
        ``room`` free cells behind it: their own cells, and those of pins in the way.

        None if ``line_of`` is, or if too few cells are free.
        """
        start = self.line_of(seqs, room)
        own, places, width = self._line(seqs, room)
        if start is None or self.free < width - own.size:
            return None
        used = self.references > 0
        target = np.where(used, np.arange(self.cells), -1)
        used[own] = False
        pushed = start + np.flatnonzero(used[start : start + width])
        used[start : start + width] = True
        target[pushed] = np.flatnonzero(~used)[: pushed.size]
        target[own] = start + places
        return target

    def _line(self, seqs: Sequence[int], room: int) -> tuple[Array, Array, int]:
        """The cells of these sequences, each cell's place from the start of the line, and its length."""
        cells = [self.rows[seq].cells for seq in seqs]
        distance = max(map(len, cells)) + room
        places = [i * distance + np.arange(row.size) for i, row in enumerate(cells)]
        return np.concatenate(cells), np.concatenate(places), len(seqs) * distance

    def room_of_line(self, seqs: Sequence[int], room: int) -> int:
        """The number of free cells that ``line_up`` needs."""
        own, _, width = self._line(seqs, room)
        return width - own.size

    def move(self, target: Array) -> None:
        """Rename cells to the targets of ``spread`` or ``line_up``."""
        self.changes += 1
        used = np.flatnonzero(self.references)
        self.blank[used] = False
        references = np.zeros_like(self.references)
        references[target[used]] = self.references[used]
        self.taken[target[used]] = self.taken[used]
        self.references = references
        for _, row in self.occupied():
            row.assign(row.positions.copy(), target[row.cells])
        for pin in self.pins.values():
            pin.set_cells(target[pin.cells])


def _sums(numbers: Array, width: int) -> Array:
    """The sum of ``width`` numbers from each place on."""
    totals = np.concatenate(([0], np.cumsum(numbers)))
    return totals[width:] - totals[: totals.size - width]


def is_run(cells: Array) -> bool:
    if cells.size < 2:
        return True
    return bool(cells[-1] - cells[0] == cells.size - 1 and (cells[1:] > cells[:-1]).all())


def indices(cells: Array) -> slice | Array:
    """The index that selects these cells from an array: a slice if they are a run, which is much faster."""
    return slice(int(cells[0]), int(cells[-1]) + 1) if cells.size and is_run(cells) else cells


_SHARED = 1 << 20
_numbers = np.arange(0)


def numbers(start: int, stop: int) -> Array:
    """``np.arange(start, stop)``, read-only: most snapshots need such numbers, and share those below a
    million, since writing them takes longer than restoring a snapshot that lies in cells.
    """
    global _numbers
    if stop > _SHARED:
        return np.arange(start, stop)
    shared = _numbers
    if stop > shared.size:
        shared = np.arange(max(stop, min(2 * stop, _SHARED)))
        shared.flags.writeable = False
        _numbers = shared
    return shared[start:stop]


def in_order(pins: Sequence[Pin]) -> Array | slice:
    """The cells of one pin after another; a slice if together they are a run."""
    start = stop = -1
    for pin in pins:
        where = pin.where
        if not isinstance(where, slice) or (stop >= 0 and where.start != stop):
            return np.concatenate([pin.cells for pin in pins])
        start, stop = (where.start if stop < 0 else start), where.stop
    return slice(start, stop)
