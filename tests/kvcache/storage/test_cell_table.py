"""The cell table against a naive one: a list of (position, cell) per sequence."""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

import ml
from kvcache.storage.cell_table import CellTable, Pin, Row, in_order

Pairs = list[tuple[int, int]]


def pairs(row: Row) -> Pairs:
    return list(zip(row.positions.tolist(), row.cells.tolist(), strict=True))


def follow(cells: list[int]) -> bool:
    return cells == list(range(cells[0], cells[0] + len(cells))) if cells else True


# One row.


def test_a_row_grows_at_the_tail_and_loses_at_the_head() -> None:
    row = Row()
    for position in range(1000):
        row.append_run(position, 5 + position, 1)
        if len(row) > 10:
            row.cut_head(1)
    assert pairs(row) == [(p, p + 5) for p in range(990, 1000)]
    assert (row.first, row.last, row.last_cell, row.span()) == (990, 999, 1004, (995, 1005))
    assert row._positions.size < 200, "a window's row does not grow with the tokens that passed"


# The table.


@dataclass
class Naive:
    cells: int
    rows: list[Pairs] = field(default_factory=list)
    pins: list[tuple[Pin, list[int]]] = field(default_factory=list)

    def references(self) -> list[int]:
        found = [0] * self.cells
        for cells in [*([cell for _, cell in row] for row in self.rows), *(cells for _, cells in self.pins)]:
            for cell in cells:
                found[cell] += 1
        return found

    def owned(self, besides: int | None = None) -> set[int]:
        return {cell for seq, row in enumerate(self.rows) if seq != besides for _, cell in row}

    def check(self, table: CellTable) -> None:
        references = self.references()
        assert table.references.tolist() == references
        assert table.free == references.count(0)
        assert table.held() == {seq: len(row) for seq, row in enumerate(self.rows) if row}
        assert table.unowned == self.cells - len(self.owned())
        assert set(np.flatnonzero(table.owned()).tolist()) == self.owned()
        for pin, cells in self.pins:
            assert pin.cells.tolist() == cells
            assert np.arange(self.cells)[pin.where].tolist() == cells
            assert isinstance(pin.where, slice) == bool(cells and follow(cells))
        for seq, held in enumerate(self.rows):
            cells = [cell for _, cell in held]
            assert table.shared(seq, np.array(cells, np.int64)) == bool(self.owned(seq).intersection(cells))
        for row, expected in zip(table.rows, self.rows, strict=True):
            assert pairs(row) == expected
            cells = [cell for _, cell in expected]
            assert row.contiguous == follow(cells)
            assert row.span() == ((min(cells), max(cells) + 1) if cells else (0, 0))
            positions = [position for position, _ in expected]
            assert row.last == max(positions, default=-1)
            assert row.end() == (expected[-1] if expected else (-1, -1))
            for at in {0, row.last, row.last + 1, *positions[:1], *(p + 1 for p in positions[:2])} - {-1}:
                assert row.index(at) == sum(position < at for position in positions)
                held = row.first_held(np.array([at, at + 2]))
                assert held == min({at, at + 2} & set(positions), default=None)


class Driver:
    """Random changes of a table and of the naive one beside it."""

    def __init__(self, rnd: random.Random) -> None:
        self.rnd = rnd
        sequences = rnd.randrange(1, 5)
        cells = sequences + int(40 * rnd.random() ** 2)
        self.table = CellTable(cells, sequences)
        self.naive = Naive(cells, [[] for _ in range(sequences)])

    def sequence(self) -> int:
        return self.rnd.randrange(len(self.naive.rows))

    def chosen(self, seq: int, count: int) -> list[int]:
        """The cells that ``choose`` gives: a run of free ones; the first free ones where there is none."""
        found, free = self.table.choose(seq, count), self.free()
        runs = [free[i : i + count] for i in range(len(free) - count + 1) if follow(free[i : i + count])]
        cells = list(range(found, found + count)) if isinstance(found, int) else found.tolist()
        assert cells in runs if runs else cells == free[:count]
        return cells

    def take(self) -> None:
        seq = self.sequence()
        count = self.rnd.randrange(1, 6)
        if count > self.table.free:
            return
        cells = self.chosen(seq, count)
        row = self.naive.rows[seq]
        last = row[-1][0] if row else -1
        if cells == list(range(cells[0], cells[0] + count)) and self.rnd.random() < 0.6:
            positions = list(range(last + 1, last + 1 + count))
            self.table.take_run(seq, positions[0], cells[0], count)
        else:
            free = sorted(set(range(last + 10)) - {position for position, _ in row})
            positions = sorted(self.rnd.sample(free, count))
            self.table.take(seq, np.array(positions), np.array(cells))
        self.naive.rows[seq] = sorted(row + list(zip(positions, cells, strict=True)))

    def append(self) -> None:
        """One token: behind the last one and in the cell behind it, or not at all."""
        seq = self.sequence()
        row = self.naive.rows[seq]
        position = self.rnd.randrange(row[-1][0] + 3) if row else 0
        cell = self.table.append(seq, position)
        if row and position > row[-1][0] and row[-1][1] + 1 in self.free():
            assert cell == row[-1][1] + 1
            row.append((position, cell))
        else:
            assert cell is None

    def append_each(self) -> None:
        """One token to each of several, where they can be appended; of two for one cell to the first."""
        asked = [seq for seq in range(len(self.naive.rows)) if self.rnd.random() < 0.8] or [0]
        rows = [self.naive.rows[seq] for seq in asked]
        positions = [self.rnd.randrange(row[-1][0] + 3) if row else 0 for row in rows]
        found = self.table.append_each(asked, np.array(positions)).tolist()
        for row, position, cell in zip(rows, positions, found, strict=True):
            if row and position > row[-1][0] and row[-1][1] + 1 in self.free():
                assert cell == row[-1][1] + 1
                row.append((position, cell))
            else:
                assert cell == -1

    def drop_heads(self) -> None:
        counts = {seq: self.rnd.randrange(len(row) + 1) for seq, row in enumerate(self.naive.rows)}
        self.table.drop_heads(counts)
        for seq, count in counts.items():
            del self.naive.rows[seq][:count]

    def free(self) -> list[int]:
        return [cell for cell, count in enumerate(self.naive.references()) if not count]

    def share(self) -> None:
        src, dst = self.sequence(), self.sequence()
        if src != dst:
            self.table.drop(dst, 0, len(self.table.rows[dst]))
            size = len(self.naive.rows[src])
            count = self.rnd.choice((size, self.rnd.randrange(size + 1)))
            self.table.share(src, dst, count)
            self.naive.rows[dst] = self.naive.rows[src][:count]

    def drop(self) -> None:
        seq = self.sequence()
        size = len(self.naive.rows[seq])
        start, stop = sorted((self.rnd.randrange(size + 1), self.rnd.randrange(size + 1)))
        self.table.drop(seq, start, stop)
        del self.naive.rows[seq][start:stop]

    def pin(self) -> None:
        """Part of a row, or of what another pin holds."""
        held = self.rnd.choice(
            [[c for _, c in row] for row in self.naive.rows] + [c for _, c in self.naive.pins]
        )
        start, stop = sorted((self.rnd.randrange(len(held) + 1), self.rnd.randrange(len(held) + 1)))
        cells = held[start:stop]
        run = bool(cells) and follow(cells) and self.rnd.random() < 0.5
        pin = self.table.pin(slice(cells[0], cells[-1] + 1) if run else np.array(cells, np.int64))
        self.naive.pins.append((pin, cells))

    def unpin(self) -> None:
        """Let go of one, at once or as a collected snapshot does; twice is once."""
        if not self.naive.pins:
            return
        pin, _ = self.naive.pins.pop(self.rnd.randrange(len(self.naive.pins)))
        if self.rnd.random() < 0.5:
            self.table.unpin(pin)
        self.table.drop_pin(pin)
        assert {id(live) for live in self.table.live_pins()} == {id(live) for live, _ in self.naive.pins}
        self.table.sweep()

    def adopt(self) -> None:
        """What restoring a snapshot in its cache does: the row shares what the pin goes on to read."""
        seq = self.sequence()
        row = self.naive.rows[seq]
        for pin, cells in self.naive.pins:
            if cells and not {cell for _, cell in row}.intersection(cells):
                last = row[-1][0] if row else -1
                positions = list(range(last + 1, last + 1 + len(cells)))
                self.table.adopt(seq, np.array(positions, np.int64), pin.cells, pin.where)
                row += zip(positions, cells, strict=True)
                return

    def evict_and_restore(self) -> None:
        """What an overflow does: heads are cut off several rows, which then come back."""
        saved = {seq: self.table.save_row(seq) for seq in range(len(self.naive.rows))}
        for seq in saved:
            self.table.drop(seq, 0, self.rnd.randrange(len(self.naive.rows[seq]) + 1))
        for seq, row in saved.items():
            self.table.restore_row(seq, row)

    def take_and_restore(self) -> None:
        """What undoing a batch does: evicted cells may have been given to another row meanwhile."""
        saved = {seq: self.table.save_row(seq) for seq in range(len(self.naive.rows))}
        before = [list(row) for row in self.naive.rows]
        for seq in saved:
            count = self.rnd.randrange(len(self.naive.rows[seq]) + 1)
            self.table.drop(seq, 0, count)
            del self.naive.rows[seq][:count]
        self.take()
        self.take()
        for seq, row in saved.items():
            self.table.restore_row(seq, row)
        self.naive.rows = before

    def spread(self) -> None:
        self.moved(self.table.spread())
        if max(self.naive.references(), default=0) < 2:
            assert all(row.contiguous for row in self.table.rows)

    def line_up(self) -> None:
        """Compared with all places that the line could have."""
        rows, rnd = self.naive.rows, self.rnd
        seqs, room = rnd.sample(range(len(rows)), rnd.randrange(1, len(rows) + 1)), rnd.randrange(5)
        own = [cell for seq in seqs for _, cell in rows[seq]]
        foreign = {cell for i, row in enumerate(rows) if i not in seqs for _, cell in row}
        distance = max(len(rows[seq]) for seq in seqs) + room
        width = len(seqs) * distance
        places = [i * distance + k for i, seq in enumerate(seqs) for k in range(len(rows[seq]))]
        starts = [
            start
            for start in range(self.table.cells - width + 1)
            if not {*range(start, start + width)} & foreign - {*own}
            and all(start + place == cell for place, cell in zip(places, own, strict=True) if cell in foreign)
        ]
        target = self.table.line_up(seqs, room)
        enough = self.table.room_of_line(seqs, room) <= self.table.free
        assert (target is not None) == bool(starts and len({*own}) == len(own) and enough)
        if target is None:
            return
        others = {*np.flatnonzero(self.table.references).tolist()} - {*own}
        begins = [int(target[cell]) - place for place, cell in zip(places, own, strict=True)]
        assert len({*begins}) < 2
        assert {*begins} <= {*starts}

        def moves(start: int) -> int:
            staying = sum(start + place == cell for place, cell in zip(places, own, strict=True))
            return len(own) - staying + len(others & {*range(start, start + width)})

        assert all(target[cell] == cell for cell in foreign)
        if begins:
            assert sum(target[cell] != cell for cell in {*own, *others}) == min(map(moves, starts))
            line = {*range(begins[0], begins[0] + width)} - {begins[0] + place for place in places}
            self.moved(target)
            assert not self.table.references[[*line]].any(), "the room is free"

    def moved(self, target: np.ndarray) -> None:
        references = self.naive.references()
        assert ((target == -1) == (np.array(references) == 0)).all()
        used = target[target != -1]
        taken = self.table.taken[target != -1]
        assert len(set(used.tolist())) == used.size
        assert used.size == 0 or (used.min() >= 0 and used.max() < self.table.cells)
        self.table.move(target)
        assert self.table.taken[used].tolist() == taken.tolist()
        self.naive.rows = [[(p, int(target[cell])) for p, cell in row] for row in self.naive.rows]
        self.naive.pins = [(pin, [int(target[cell]) for cell in cells]) for pin, cells in self.naive.pins]


class Seen:
    """What a reader keeps, to learn from the counters and from ``taken`` whether it still holds."""

    def __init__(self, driver: Driver) -> None:
        table, naive = driver.table, driver.naive
        self.free, self.taken = driver.free(), table.taken.copy()
        self.changes, self.appended = table.changes, table.appended
        self.rows, self.pins = [list(row) for row in naive.rows], [list(cells) for _, cells in naive.pins]

    def check(self, driver: Driver, moved: bool) -> None:
        table, naive = driver.table, driver.naive
        assert table.changes >= self.changes
        if table.changes == self.changes:
            assert self.pins == [cells for _, cells in naive.pins]
            behind = 0
            for row, before in zip(naive.rows, self.rows, strict=True):
                assert row[: len(before)] == before
                assert follow([cell for _, cell in row[max(0, len(before) - 1) :]])
                behind += len(row) - len(before)
            assert table.appended == self.appended + behind
        if not moved:
            reused = sorted(set(self.free).difference(driver.free()))
            assert (table.taken[reused] > self.taken.max()).all()
            assert np.delete(table.taken, reused).tolist() == np.delete(self.taken, reused).tolist()


@pytest.mark.parametrize("block", range(10))
def test_random_changes_agree_with_the_naive_table(block: int) -> None:
    for seed in range(block * 30, block * 30 + 30):
        driver = Driver(random.Random(seed))
        changes = [driver.take] * 4 + [driver.append, driver.append_each] * 2 + [driver.share, driver.drop]
        changes += [driver.drop_heads, driver.evict_and_restore, driver.take_and_restore, driver.spread]
        changes += [driver.pin, driver.pin, driver.unpin, driver.adopt, driver.line_up]
        moving = driver.spread, driver.line_up, driver.take_and_restore
        for _ in range(25):
            change, before = driver.rnd.choice(changes), Seen(driver)
            change()
            driver.naive.check(driver.table)
            before.check(driver, moved=change in moving)


def test_sequences_start_in_shares_of_their_own_and_grow_in_runs() -> None:
    table = CellTable(30, 3)
    for position in range(10):
        for seq in range(3):
            cell = table.choose(seq, 1)
            assert cell == seq * 10 + position
            table.take_run(seq, position, int(cell), 1)
    assert table.free == 0
    assert all(row.contiguous for row in table.rows)


def test_a_row_that_lost_its_head_goes_on_right_before_its_first_cell() -> None:
    """What a window lets go of next lies behind that: no free cell comes to lie among those in use."""
    table = CellTable(24, 2)
    row = table.rows[1]
    table.take_run(1, 0, 12, 12)
    for position in range(12, 40):
        table.drop(1, 0, len(row) - 5)
        if table.append(1, position) is None:
            table.take(1, np.array([position]), np.array([table.choose(1, 1)]))
        assert row.span() == (18, 24)


@pytest.mark.parametrize(
    ("rows", "seq", "chosen"),
    [
        pytest.param(([0, 1, 10, 11, 12, 19], [9, 2]), 0, 5, id="a sequence ends there"),
        pytest.param(([0, 1, 10, 11, 12, 19], [2, 9]), 0, 3, id="none ends there"),
        pytest.param(([8, 9], [10, 12, 19]), 1, 0, id="the first cells"),
    ],
)
def test_the_largest_hole_is_used_from_its_middle_where_a_sequence_may_grow(
    rows: tuple[list[int], ...], seq: int, chosen: int
) -> None:
    table = CellTable(20, len(rows))
    for owner, cells in enumerate(rows):
        table.take(owner, np.arange(len(cells)), np.array(cells))
    assert table.choose(seq, 2) == chosen


@pytest.mark.parametrize("cells", [4, np.array([6, 4, 5])])
def test_a_layer_waits_for_the_cells_of_the_pass_under_way(cells: int | np.ndarray) -> None:
    table = CellTable(9, 1)
    assert not table.awaited(0, np.arange(9))
    table.placed = 2, cells, 3
    assert [table.awaited(1, np.array([cell])) for cell in range(9)] == [4 <= cell < 7 for cell in range(9)]
    assert not table.awaited(2, np.arange(9))


def test_pins_that_follow_each_other_are_one_run() -> None:
    pins = [
        Pin(slice(2, 4)),
        Pin(slice(4, 5)),
        Pin(np.array([5, 6])),
        Pin(slice(8, 9)),
        Pin(np.array([1, 0])),
    ]
    assert in_order(pins[:3]) == slice(2, 7)
    for some in (pins[:4], pins[:2] + pins[4:]):
        cells = in_order(some)
        assert isinstance(cells, np.ndarray)
        assert cells.tolist() == [cell for pin in some for cell in pin.cells.tolist()]


def test_spreading_leaves_room_behind_every_row() -> None:
    table = CellTable(12, 2)
    table.take(0, np.arange(2), np.array([7, 3]))
    table.take(1, np.arange(2), np.array([2, 8]))
    table.move(table.spread())
    for seq in range(2):
        last = table.rows[seq].last_cell
        assert table.choose(seq, 4) == last + 1


def test_a_row_as_long_as_its_home_keeps_it() -> None:
    table = CellTable(12, 2)
    table.take_run(0, 0, 4, 2)
    table.take(1, np.arange(6), np.array([0, 1, 2, 3, 7, 8]))
    table.move(table.spread())
    assert [row.span() for row in table.rows] == [(0, 2), (6, 12)]


@dataclass
class Transfer:
    """Copies into ``cells``, which end when they are joined, or before; with ``error`` they fail."""

    cells: list[int]
    ended: bool = False
    error: ml.DeviceError | None = None
    joined: int = 0

    def done(self) -> bool:
        return self.ended

    def join(self) -> None:
        self.joined += 1
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    ("cells", "joined"),
    [(None, [1, 1, 1, 1]), ([0, 1], [1, 0, 1, 1]), ([3], [0, 1, 1, 1]), ([], [0, 0, 1, 1])],
    ids=["all", "of one row", "of another row", "free ones"],
)
def test_what_follows_comes_after_the_copies_to_its_cells_and_to_free_ones(
    cells: list[int] | None, joined: list[int]
) -> None:
    table = CellTable(6, 2)
    table.take_run(0, 0, 0, 2)
    table.take_run(1, 0, 2, 2)
    copies = [Transfer([0, 1]), Transfer([2, 3]), Transfer([4]), Transfer([2], ended=True)]
    for copy in copies:
        table.arrivals.add(np.array(copy.cells), copy)
    for _ in range(2):
        table.join_arrivals(None if cells is None else np.array(cells, np.int64))
    assert [copy.joined for copy in copies] == joined
    assert bool(table.arrivals) == (0 in joined)


@pytest.mark.parametrize("owned", [True, False])
def test_a_copy_that_fails_is_an_error_where_somebody_owns_its_cells(owned: bool) -> None:
    table = CellTable(6, 2)
    table.take_run(0, 0, 0, 2)
    table.take_run(1, 0, 2, 2)
    table.arrivals.add(np.array([2 if owned else 4]), Transfer([], error=ml.DeviceError("gone")))
    with pytest.raises(ml.DeviceError, match="gone") if owned else contextlib.nullcontext():
        table.join_arrivals()
    assert [row.lost for row in table.rows] == [False, owned]
    table.join_arrivals()
