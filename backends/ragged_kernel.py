"""Attention of a ragged batch as two kernels, in C for both CUDA and Metal, and their launch parameters.

``PARTS``: a block computes attention of up to ROWS queries that share a KV head (query heads of a group, and
readers of one segment) to one chunk of a segment, whose keys and values it reads once. ``MERGE``: a block
merges the parts of one query and head, and its sink. There are two launches for any number of sequences.

Both are function bodies. To compile them, define in the respective language:

* ``SHARED``, ``BARRIER()``, ``EXP(x)``, ``LOAD(x)`` to float, ``STORE(x)`` from float, ``WIDE`` (64 bits);
* ``me``, ``block_x``, ``block_y``: int, this thread of its block, and the block;
* ``Shape.defines`` before all of it;
* for PARTS ``query``, ``key``, ``value``, ``plan`` (``RaggedPlan.pack``), ``work`` (``Launch.work``),
  ``scaling``, strides in elements ``query_0`` to ``value_2``, and the outputs ``sums`` and ``stats`` (float);
* for MERGE ``sums``, ``stats``, ``work``, ``sinks`` (float), and the output ``out``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from ml.errors import ShapeError
from ml.protocols import Context, Tensor
from ml.ragged import RaggedPlan

THREADS = 128
KEYS = 32
"""Keys per step of a block; a thread computes the scores of one of them."""
SLICE = 64
"""Elements of each key per step."""
QUERY_BYTES = 16384
"""The most bytes of a block's queries, so that all of its memory stays below Metal's 32 KiB."""
LARGEST = 1024
"""The most elements of a head for these kernels."""
BLOCKS = 1024
"""The blocks that keep a large device busy: histories are cut into chunks until there are about this many."""
SHORTEST = 256
"""The fewest rows that are worth a chunk."""

PARTS = """
    constexpr int SPAN = GROUP < ROWS ? GROUP : ROWS;  // query heads of a block; its other rows are readers
    constexpr int HEAD_BLOCKS = (GROUP + SPAN - 1) / SPAN;
    constexpr int HEADS = KV_HEADS * GROUP;
    constexpr int SIDES = THREADS / KEYS;  // threads that share a key, each with rows of its own
    constexpr int SIDE_ROWS = (ROWS + SIDES - 1) / SIDES;
    constexpr int LANES = V_DIM < THREADS ? V_DIM : THREADS;  // threads side by side on a value
    constexpr int TEAMS = THREADS / LANES;
    constexpr int TEAM_ROWS = (ROWS + TEAMS - 1) / TEAMS;
    constexpr int COLUMNS = (V_DIM + LANES - 1) / LANES;
    constexpr float LOWEST = -3.0e38f;

    SHARED float queries[ROWS * HEAD_DIM];
    SHARED float stage[KEYS * (SLICE + 1)];  // one more: threads that read a column use different banks
    SHARED float scores[ROWS * KEYS];
    SHARED float tops[ROWS];
    SHARED float factors[ROWS];
    SHARED int begins[ROWS];
    SHARED int ends[ROWS];
    SHARED int cells[KEYS];

    const int task = 8 + 4 * block_x;
    const int segment = 8 + 5 * work[task];
    const int first = work[task + 1];
    const int stop = work[task + 2];
    const int chunk = work[task + 3];
    const int kv_head = block_y / HEAD_BLOCKS;
    const int first_head = (block_y % HEAD_BLOCKS) * SPAN;
    const int gathered = plan[segment];
    const int start = plan[segment + 1];
    const int readers = plan[4];
    const int index = plan[5];

    if (me < ROWS) {  // a row that is not there, or sees nothing of this chunk, ends before it begins
        const int reader = first + me / SPAN;
        const bool there = reader < stop && first_head + me % SPAN < GROUP;
        const int low = chunk * work[0];
        const int high = low + work[0];
        const int begin = there ? plan[readers + 3 * reader + 1] : high;
        const int end = there ? plan[readers + 3 * reader + 2] : low;
        begins[me] = begin > low ? begin : low;
        ends[me] = end < high ? end : high;
        tops[me] = LOWEST;
    }
    BARRIER();
    int low = begins[0];
    int high = ends[0];
    for (int row = 1; row < ROWS; ++row) {
        low = begins[row] < low ? begins[row] : low;
        high = ends[row] > high ? ends[row] : high;
    }
    for (int e = me; e < ROWS * HEAD_DIM; e += THREADS) {
        const int row = e / HEAD_DIM;
        float element = 0.0f;
        if (begins[row] < ends[row]) {
            const int token = plan[readers + 3 * (first + row / SPAN)];
            const int head = kv_head * GROUP + first_head + row % SPAN;
            element = LOAD(query[token * query_0 + head * query_1 + (e % HEAD_DIM) * query_2]) * scaling;
        }
        queries[e] = element;
    }

    const int column = me % KEYS;
    const int side = me / KEYS;
    const int lane = me % LANES;
    const int team = me / LANES;
    float sum = 0.0f;  // of the weights of row me
    float parts[TEAM_ROWS * COLUMNS];
    for (int e = 0; e < TEAM_ROWS * COLUMNS; ++e) parts[e] = 0.0f;

    for (int from = low; from < high; from += KEYS) {
        const int count = high - from < KEYS ? high - from : KEYS;
        BARRIER();  // the keys before are done with
        if (me < count) cells[me] = gathered ? plan[index + start + from + me] : start + from + me;

        float products[SIDE_ROWS];
        for (int i = 0; i < SIDE_ROWS; ++i) products[i] = 0.0f;
        for (int slice = 0; slice < HEAD_DIM; slice += SLICE) {
            const int size = HEAD_DIM - slice < SLICE ? HEAD_DIM - slice : SLICE;
            BARRIER();
            for (int e = me; e < KEYS * SLICE; e += THREADS) {
                const int k = e / SLICE;
                const int d = e % SLICE;
                if (k < count && d < size) {
                    const WIDE place = cells[k] * key_0 + kv_head * key_1 + (slice + d) * key_2;
                    stage[k * (SLICE + 1) + d] = LOAD(key[place]);
                }
            }
            BARRIER();
            if (column < count) {
                for (int d = 0; d < size; ++d) {
                    const float element = stage[column * (SLICE + 1) + d];
                    for (int i = 0; i < SIDE_ROWS; ++i) {
                        const int row = side + SIDES * i;
                        if (row < ROWS) products[i] += queries[row * HEAD_DIM + slice + d] * element;
                    }
                }
            }
        }
        for (int i = 0; i < SIDE_ROWS; ++i) {
            const int row = side + SIDES * i;
            if (row < ROWS && column < count) scores[row * KEYS + column] = products[i];
        }
        BARRIER();
        if (me < ROWS) {
            float top = tops[me];
            for (int k = 0; k < count; ++k) {
                const float score = scores[me * KEYS + k];
                const bool seen = begins[me] <= from + k && from + k < ends[me];
                if (seen && score > top) top = score;
            }
            factors[me] = EXP(tops[me] - top);
            tops[me] = top;
        }
        BARRIER();
        for (int i = 0; i < SIDE_ROWS; ++i) {
            const int row = side + SIDES * i;
            if (row < ROWS && column < count) {
                const bool seen = begins[row] <= from + column && from + column < ends[row];
                scores[row * KEYS + column] = seen ? EXP(products[i] - tops[row]) : 0.0f;
            }
        }
        BARRIER();
        if (me < ROWS) {
            sum *= factors[me];
            for (int k = 0; k < count; ++k) sum += scores[me * KEYS + k];
        }
        if (team < TEAMS) {
            for (int i = 0; i < TEAM_ROWS; ++i) {
                const int row = team + TEAMS * i;
                const float factor = row < ROWS ? factors[row] : 0.0f;
                for (int c = 0; c < COLUMNS; ++c) parts[i * COLUMNS + c] *= factor;
            }
            for (int k = 0; k < count; ++k) {
                for (int c = 0; c < COLUMNS; ++c) {
                    const int d = lane + LANES * c;
                    if (d < V_DIM) {
                        const WIDE place = cells[k] * value_0 + kv_head * value_1 + d * value_2;
                        const float element = LOAD(value[place]);
                        for (int i = 0; i < TEAM_ROWS; ++i) {
                            const int row = team + TEAMS * i;
                            const float weight = row < ROWS ? scores[row * KEYS + k] : 0.0f;
                            // What a row does not see may be NaN.
                            if (weight != 0.0f) parts[i * COLUMNS + c] += weight * element;
                        }
                    }
                }
            }
        }
    }

    for (int row = 0; row < ROWS; ++row) {
        if (begins[row] < ends[row]) {
            const int reader = first + row / SPAN;
            const int slot = work[work[1] + reader] + chunk - plan[readers + 3 * reader + 1] / work[0];
            const WIDE place = (WIDE)slot * HEADS + kv_head * GROUP + first_head + row % SPAN;
            if (team < TEAMS && row % TEAMS == team) {
                for (int c = 0; c < COLUMNS; ++c) {
                    const int d = lane + LANES * c;
                    if (d < V_DIM) sums[place * V_DIM + d] = parts[row / TEAMS * COLUMNS + c];
                }
            }
            if (me == row) {
                stats[2 * place] = tops[row];
                stats[2 * place + 1] = sum;
            }
        }
    }
"""
"""Computes the weighted sum of values of each part, its largest score, and its sum of weights."""

MERGE = """
    constexpr int HEADS = KV_HEADS * GROUP;
    constexpr float LOWEST = -3.0e38f;
    const int first = work[work[2] + block_x];
    const int stop = work[work[2] + block_x + 1];
    float top = SINKS ? sinks[block_y] : LOWEST;
    for (int slot = first; slot < stop; ++slot) {
        const float other = stats[2 * ((WIDE)slot * HEADS + block_y)];
        if (other > top) top = other;
    }
    float total = SINKS ? EXP(sinks[block_y] - top) : 0.0f;
    for (int slot = first; slot < stop; ++slot) {
        const WIDE place = (WIDE)slot * HEADS + block_y;
        total += EXP(stats[2 * place] - top) * stats[2 * place + 1];
    }
    for (int d = me; d < V_DIM; d += THREADS) {
        float sum = 0.0f;
        for (int slot = first; slot < stop; ++slot) {
            const WIDE place = (WIDE)slot * HEADS + block_y;
            sum += EXP(stats[2 * place] - top) * sums[place * V_DIM + d];
        }
        out[((WIDE)block_x * HEADS + block_y) * V_DIM + d] = STORE(sum / total);
    }
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """The compile-time constants of the kernels."""

    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    sinks: bool

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Shape | None:
        """The shape for these operands; None if the kernels do not support them."""
        (_, heads, head_dim), kv_heads, v_dim = query.shape, key.shape[1], value.shape[2]
        one_dtype = query.dtype is key.dtype is value.dtype and query.dtype.is_float
        empty = 0 in (*query.shape, kv_heads, v_dim)
        if sinks is not None and sinks.shape != (heads,):
            raise ShapeError(
                f"ragged_attention: sinks {sinks.shape}; they must be ({heads},), one for each head"
            )
        if empty or heads % kv_heads or not one_dtype or max(head_dim, v_dim) > LARGEST:
            return None
        return cls(heads, kv_heads, head_dim, v_dim, sinks is not None)

    @property
    def rows(self) -> int:
        """Queries per block, each of one head; a power of 2."""
        return min(16, 1 << (QUERY_BYTES // (4 * self.head_dim)).bit_length() - 1)

    @property
    def span(self) -> int:
        """Query heads of a block."""
        return min(self.heads // self.kv_heads, self.rows)

    @property
    def blocks(self) -> int:
        """Blocks for all heads."""
        return self.kv_heads * -(-(self.heads // self.kv_heads) // self.span)

    @property
    def constants(self) -> dict[str, int]:
        return {
            "ROWS": self.rows,
            "GROUP": self.heads // self.kv_heads,
            "KV_HEADS": self.kv_heads,
            "HEAD_DIM": self.head_dim,
            "V_DIM": self.v_dim,
            "SINKS": int(self.sinks),
        }

    @property
    def defines(self) -> str:
        """The definitions for compiling the kernels."""
        constants = {"THREADS": THREADS, "KEYS": KEYS, "SLICE": SLICE} | self.constants
        return "".join(f"#define {name} {value}\n" for name, value in constants.items())


@dataclass(frozen=True, slots=True)
class Launch:
    """The launch of a plan: ``tasks`` blocks for each of ``Shape.blocks``, and ``slots`` parts to be merged.

    ``work`` (I32): a header of 8, with the rows of a chunk, the offset of each reader's first slot, and the
    offset of each query's first slot (ending with the total); then from 8 on, for each task its segment, its
    readers ``[first, stop)``, and its chunk, counted from the start of the segment. A reader has a slot for
    each chunk of which it sees a part; those of a query are consecutive.
    """

    work: Tensor
    tasks: int
    slots: int


def launch(ctx: Context, plan: RaggedPlan, shape: Shape) -> Launch:
    """The launch of a plan, created and uploaded once for all layers of one shape."""
    abreast, blocks = shape.rows // shape.span, shape.blocks
    plan.lay_whole()  # the kernels read the plan too
    (tasks, slots), on = plan.lay(f"ragged_kernel {abreast} {blocks}", partial(_pack, abreast, blocks))
    return Launch(on(ctx), tasks, slots)


def _pack(abreast: int, blocks: int, plan: RaggedPlan) -> tuple[tuple[int, int], np.ndarray]:
    work, tasks, slots = layout(plan, abreast, blocks)
    return (tasks, slots), work


def layout(plan: RaggedPlan, abreast: int, blocks: int) -> tuple[np.ndarray, int, int]:
    """``Launch.work``, its tasks and slots, with up to ``abreast`` readers in a block."""
    _, begins, ends = plan.readers.T
    # Tiles of readers, and the rows that any reader of a tile sees.
    order = np.argsort(plan.segments[:, 3], kind="stable")
    lowest, highest = plan.segments[order, 3:].T
    counts = -(-(highest - lowest) // abreast)
    segment = np.repeat(order, counts)
    first = np.repeat(lowest, counts) + abreast * _counted(counts)
    stop = np.minimum(first + abreast, np.repeat(highest, counts))
    begin, end = np.minimum.reduceat(begins, first), np.maximum.reduceat(ends, first)

    rows = -(-int((end - begin).sum()) * blocks // BLOCKS)
    chunk = -(-max(rows, SHORTEST) // KEYS) * KEYS
    # A task for each chunk of a tile.
    lead = begin // chunk
    counts = -(-end // chunk) - lead
    tile = np.repeat(np.arange(first.size), counts)
    tasks = np.stack([segment[tile], first[tile], stop[tile], lead[tile] + _counted(counts)], 1)
    # A slot for each chunk of a reader, in the order of the queries.
    counts = (-(-ends // chunk) - begins // chunk)[plan.parts]
    edges = np.concatenate(([0], np.cumsum(counts)))
    slots = np.empty(len(plan.readers), np.int64)
    slots[plan.parts] = edges[:-1]

    header = np.zeros(8, np.int64)
    header[:3] = chunk, 8 + tasks.size, 8 + tasks.size + slots.size
    work = np.concatenate([header, tasks.ravel(), slots, edges[plan.part_starts]])
    return work.astype(np.int32), len(tasks), int(edges[-1])


def _counted(counts: np.ndarray) -> np.ndarray:
    """0, 1, ... up to each count, concatenated."""
    ends = np.cumsum(counts)
    numbers: np.ndarray = np.arange(int(ends[-1])) - np.repeat(ends - counts, counts)
    return numbers
