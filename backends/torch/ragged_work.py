"""A ragged plan as work for a grid of programs: tiles of readers times chunks of keys, in integers.

A *tile* is a group of readers of one segment, whose shared rows are read once for all of them. A tile that
sees many keys is cut into *chunks*, so that a few long sequences keep a whole GPU busy (Flash-Decoding). One
tile over one chunk is an *item*: one program per KV head. A query whose keys are in several items has a
*slot* for the result of each, and these are merged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ml.errors import BoundsError
from ml.ragged import RaggedPlan

HEADER = 8
"""The number of integers in the header of ``Work.packed``."""
SHORTEST_CHUNK = 128
"""The fewest keys for which a chunk is worth merging."""
STARTING = 128
"""Starting a program takes about as long as reading this many keys; an estimate."""
READING = 64
"""Reading a key takes about as long as computing with it for this many rows of a tile."""
SHARED_BYTES = 96 << 10
"""The shared memory of a multiprocessor for the keys and values of one program; two programs fit."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The compile-time constants of a kernel: the rows and keys that a program holds at once, and how it
    computes.
    """

    rows: int
    heads: int
    """Query heads of a KV head in one tile; further heads take more tiles."""
    keys: int
    warps: int
    stages: int

    @property
    def readers(self) -> int:
        return self.rows // self.heads


@dataclass(frozen=True, slots=True)
class Work:
    """``packed``: I32, a header of 8, then the arrays that it names, flattened.

    The header has the numbers of items, of merged queries and of slots, and the offsets of ``items``,
    ``pairs``, ``merges`` and ``index``; the last integer is 0.

    ``items`` (W, 8): ``gathered, start, low, first, stop, high, pair, pairs``. Rows of the buffers are
    specified as in ``RaggedPlan.segments``; the item covers rows ``[low, high)`` of the segment, of which
    every reader sees ``[first, stop)``, whole blocks of keys. Its readers are ``pairs[pair : pair + pairs]``.

    ``pairs`` (P, 4): ``query, begin, end, slot``: as ``RaggedPlan.readers``. The slot is -1 if the query has
    only this part, and -2 if it sees nothing of the item.

    ``merges`` (M, 3): ``query, first, stop``: its slots. ``index`` is the plan's.
    """

    tile: Tile
    packed: np.ndarray
    items: int
    merges: int
    slots: int
    indexed: bool
    reach: int
    """The number of rows that the buffers must have."""


def padded(size: int) -> int:
    """The head dimension padded to a power of 2; tensor cores need at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def choose_tile(plan: RaggedPlan, group: int, head_dim: int, v_dim: int, itemsize: int) -> Tile:
    """``group``: query heads per KV head; ``itemsize``: bytes of an element.

    Rows: a power of 2, at least 16. More rows read each key fewer times, but waste work for segments with
    fewer readers, and registers are limited. Keys: as many as leave room for two stages.
    """
    width = padded(head_dim) + padded(v_dim)
    most = max(16, 2 * 128 * 128 // (width * itemsize // 2))
    counts = _reader_counts(plan)
    rows = 16
    if group > rows or counts.max(initial=0) > rows // group:  # otherwise one tile of these has all readers
        sizes = [r for r in (16, 32, 64, 128) if r <= most]
        rows = min(sizes, key=lambda r: _cost(counts, plan.segments[:, 2], group, r))
    keys = max(16, min(64, SHARED_BYTES // (2 * width * itemsize)))
    keys = 1 << (keys.bit_length() - 1)
    stages = 3 if 3 * keys * width * itemsize <= SHARED_BYTES else 2
    warps = 8 if rows >= 128 or rows * padded(v_dim) >= 128 * 128 else 4
    return Tile(rows, min(group, rows), keys, warps, stages)


def _cost(counts: np.ndarray, lengths: np.ndarray, group: int, rows: int) -> int:
    heads = min(group, rows)
    tiles = -(-counts // (rows // heads)) * -(-group // heads)
    return int((tiles * lengths).sum()) * (rows + READING)


def divide(plan: RaggedPlan, tile: Tile, programs: int, copies: int) -> Work:
    """The work of a plan in tiles like ``tile``; chunks are of whole blocks of keys.

    ``programs``: the number of programs that the device runs at once; each item runs ``copies`` times.
    """
    first, counts, segment = _tiles(plan, tile.readers)
    members = _ranges(first, counts)
    begins, ends = plan.readers[members, 1], plan.readers[members, 2]
    at = np.cumsum(counts) - counts
    low, high = np.minimum.reduceat(begins, at), np.maximum.reduceat(ends, at)
    if (begins >= ends).any():
        raise BoundsError("ragged_attention: a reader of the plan sees no rows; it must see at least one")
    reach = _reach(plan, segment, low, high)
    owner, item_low, item_high = _chunks(low, high, tile.keys, programs, copies)
    shared = np.clip(np.maximum.reduceat(begins, at)[owner], item_low, item_high)
    whole = np.clip(np.minimum.reduceat(ends, at)[owner], shared, item_high) - shared
    pair_counts = counts[owner]
    read = plan.readers[_ranges(first[owner], pair_counts)]
    seen = np.minimum(read[:, 2], np.repeat(item_high, pair_counts)) > np.maximum(
        read[:, 1], np.repeat(item_low, pair_counts)
    )
    slots, merges, total = _slots(read[:, 0], seen, plan.tokens)
    pairs = np.column_stack((read, slots))
    items = np.column_stack((
        plan.segments[segment[owner], :2],
        item_low, shared, shared + whole // tile.keys * tile.keys, item_high,
        np.cumsum(pair_counts) - pair_counts, pair_counts,
    ))  # fmt: skip
    places = HEADER + np.cumsum([0, items.size, pairs.size, merges.size])
    arrays = [items.ravel(), pairs.ravel(), merges.ravel(), plan.index]
    header = np.array([len(items), len(merges), total, *places, 0])
    packed = np.concatenate([header, *arrays]).astype(np.int32)
    return Work(tile, packed, len(items), len(merges), total, bool(plan.index.size), reach)


def _reader_counts(plan: RaggedPlan) -> np.ndarray:
    counts: np.ndarray = (plan.segments[:, 4] - plan.segments[:, 3]).astype(np.int64)
    return counts


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """``[starts[i], starts[i] + counts[i])`` for all i, concatenated."""
    if counts.size and counts.min() == counts.max() == 1:
        return starts
    before = np.cumsum(counts) - counts
    together: np.ndarray = np.arange(int(counts.sum())) + np.repeat(starts - before, counts)
    return together


def _tiles(plan: RaggedPlan, readers: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The first reader of each tile, its number of readers, and its segment."""
    counts = _reader_counts(plan)
    if counts.max(initial=0) <= readers:
        return plan.segments[:, 3], counts, np.arange(len(counts))
    tiles = -(-counts // readers)
    segment = np.repeat(np.arange(len(tiles)), tiles)
    first = plan.segments[segment, 3] + _ranges(np.zeros_like(tiles), tiles) * readers
    return first, np.minimum(readers, plan.segments[segment, 4] - first), segment


def _reach(plan: RaggedPlan, segment: np.ndarray, low: np.ndarray, high: np.ndarray) -> int:
    """One more than the largest row that is read. Raises BoundsError for invalid rows."""
    gathered, start, length = plan.segments[segment, :3].T
    if (low < 0).any() or (high > length).any() or (start < 0).any():
        raise BoundsError("ragged_attention: a reader of the plan sees rows outside of its segment")
    listed = gathered == 1
    if (listed & (start + high > plan.index.size)).any() or (plan.index.size and plan.index.min() < 0):
        raise BoundsError(
            f"ragged_attention: the plan refers to rows outside of its index ({plan.index.size},)"
        )
    runs = (start + high)[~listed]
    return max(int(runs.max(initial=0)), int(plan.index.max(initial=-1)) + 1)


def _chunks(
    low: np.ndarray, high: np.ndarray, block: int, programs: int, copies: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tile and the rows of each item; only the last chunk of a tile is shorter."""
    lengths = (high - low).astype(np.int64)
    longest = _longest(lengths, programs, copies)
    pieces = -(-lengths // longest)
    piece = -(-lengths // (pieces * block)) * block
    pieces = -(-lengths // piece)
    tile = np.repeat(np.arange(len(low)), pieces)
    item_low = low[tile] + _ranges(np.zeros_like(pieces), pieces) * piece[tile]
    return tile, item_low, np.minimum(item_low + piece[tile], high[tile])


def _longest(lengths: np.ndarray, programs: int, copies: int) -> int:
    """The keys per chunk with which the last program ends earliest; for tiles of equal length, in one or two
    waves. A device that runs ``programs`` at once needs two waves for one more. Tiles of unequal length do
    not run in waves; then no chunk should be much longer than the others.
    """
    total, tiles = int(lengths.sum()), len(lengths)
    shares = [-(-total * copies // (2 * programs))]
    # Each tile is rounded up by less than one chunk: there are no more than ``most``.
    waves = (programs // copies, 2 * programs // copies)
    shares += [-(-total // (most - tiles + 1)) for most in waves if most >= tiles]

    def end(longest: int) -> float:
        pieces = -(-lengths // longest)
        items, chunk = int(pieces.sum()) * copies, int((-(-lengths // pieces)).max())
        in_waves = -(-items // programs) * (chunk + STARTING)
        return min(in_waves, (total * copies + items * STARTING) / programs + chunk)

    choices = sorted({max(SHORTEST_CHUNK, share) for share in shares}, reverse=True)
    return choices[0] if len(choices) == 1 else min(choices, key=end)


def _slots(queries: np.ndarray, seen: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray, int]:
    """The slot of each pair, the slots of each query with several, and the number of slots."""
    parts = np.bincount(queries[seen], minlength=tokens)
    several = parts > 1
    slots = np.where(seen, -1, -2)
    which = np.flatnonzero(seen & several[queries])
    slots[which[np.argsort(queries[which], kind="stable")]] = np.arange(which.size)
    merged = np.flatnonzero(several)
    stops = np.cumsum(parts[merged])
    return slots, np.column_stack((merged, stops - parts[merged], stops)), which.size
