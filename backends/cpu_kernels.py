"""Attention by a plan over host memory, compiled by numba on import. For each KV head, attention processes
the rows of a segment in chunks that stay in the processor's cache, for all queries of all heads that read
them, with an online softmax (Dao et al., FlashAttention, 2022). Plain F32 rows are read in place; others are
first widened to F32, once for all queries. Everything is F32. ``ARITHMETIC`` allows sums in any order; NaN
and infinity keep their meaning.

Kernels get addresses and byte steps as integers: the caller has checked both, and keeps the memory alive.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types  # type: ignore[attr-defined]

from backends.cpu_attention import BLOCK, KINDS
from backends.cpu_vectors import (
    EXPONENT,
    LANES,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    POLYNOMIAL,
    ROUNDING,
    SMALLEST,
    TALL,
    WIDE,
    add_four_one,
    add_four_two,
    add_one_eight,
    add_one_four,
    add_one_one,
    add_one_two,
    add_two_four,
    add_two_one,
    copy,
    exponentials,
    fetch,
    highest,
    score_block,
    score_column,
    score_one,
    score_row,
    to_floats,
    to_halves,
    to_integers,
    to_places,
    widen_eight,
    widen_four,
)  # fmt: skip
from backends.numba_options import kernel, part

CHUNK = 128
"""The number of rows whose scores are kept at a time."""
AHEAD, AHEAD_IN_PLACE = 16, 8
"""How many rows before their use rows are asked for: rows to be widened, and keys that are read in place.
Values in place are asked for with the keys of their chunk. F32 rows of 64 and 80 floats that no processor
cache has are read in 0.45 to 0.85 of the time.
"""
SHORT, LONG, CACHED = 64, 128, 1 << 20
"""In place, calls that read at most ``CACHED`` bytes do not ask for rows shorter than ``SHORT`` floats, and
none ask for keys of ``LONG`` floats or more: the processor foresees these by itself.
"""
F32, F16, BF16, Q8, _ = KINDS.values()
ARITHMETIC = {"reassoc", "contract", "nsz"}
EXACT = {"contract"}
"""Not empty, since numba replaces an empty set by the caller's."""
ZERO, ONE, NOTHING = np.float32(0), np.float32(1), np.float32(-np.inf)
LISTED = types.Array(types.int32, 1, "C", readonly=True)
TABLE = types.Array(types.int32, 2, "C", readonly=True)


@part(ARITHMETIC)
def _padded(dim: Any) -> Any:
    return -(-dim // LANES) * LANES


@part(ARITHMETIC)
def _floats(address: Any, count: Any) -> Any:
    return carray(to_floats(address), (count,))


@part(ARITHMETIC)
def _integers(address: Any, rows: Any, each: Any) -> Any:
    return carray(to_integers(address), (rows, each))


@part(ARITHMETIC)
def _halves(address: Any, count: Any) -> Any:
    return carray(to_halves(address), (count,))


@part(EXACT)
def _from_half(bits: Any) -> Any:
    """The F32 of an F16's bits."""
    magnitude = np.int32((np.int32(bits) & np.int32(0x7FFF)) << np.int32(13))
    found = np.int32(magnitude).view(np.float32) * np.float32(2.0**112)
    if magnitude >= np.int32(0x7C00 << 13):
        found = np.int32(magnitude | np.int32(0x7F800000)).view(np.float32)
    return -found if bits & 0x8000 else found


@part(EXACT)
def _exp(x: Any) -> Any:
    """exp of x <= 0, clamped to ``SMALLEST``; within 2 units in the last place."""
    x = SMALLEST if x < SMALLEST else x
    shifted = x * LOG2_E + ROUNDING
    whole = shifted - ROUNDING
    r = x - whole * LN2_HIGH
    r = r - whole * LN2_LOW
    p = POLYNOMIAL[0]
    for i in range(1, len(POLYNOMIAL)):
        p = p * r + POLYNOMIAL[i]
    p = p * (r * r) + r + ONE
    power = np.int32((np.float32(shifted).view(np.int32) + np.int32(EXPONENT)) << np.int32(23))
    return p * np.int32(power).view(np.float32)


@part(EXACT)
def _exponentials(scores: Any, count: Any, top: Any) -> Any:
    """A separate function, since ``ARITHMETIC`` would optimize the rounding away."""
    return exponentials(scores, count, top)


@part(EXACT)
def _read_row(kind: Any, row: Any, scales: Any, count: Any, width: Any, factor: Any, out: Any) -> None:
    """Read ``count`` values of a row, times ``factor`` (1 for codes), then zeros up to ``width``."""
    into = _floats(out, width)
    if kind == F32:
        given = _floats(row, count)
        for d in range(count):
            into[d] = given[d] * factor
    elif kind == F16:
        bits = _halves(row, count)
        for d in range(count):
            into[d] = _from_half(bits[d]) * factor
    elif kind == BF16:
        bits = _halves(row, count)
        for d in range(count):
            into[d] = np.int32(np.int32(bits[d]) << np.int32(16)).view(np.float32) * factor
    else:
        each = _halves(scales, count // BLOCK)
        if kind == Q8:
            for b in range(each.size):
                widen_eight(row + b * 32, _from_half(each[b]), out + b * 128)
        else:
            for b in range(each.size):
                widen_four(row + b * 16, _from_half(each[b]), out + b * 128)
    for d in range(count, width):
        into[d] = ZERO


@part(ARITHMETIC)
def _rows(
    stored: Any, head: Any, dim: Any, width: Any, index: Any, gathered: Any, first: Any, count: Any, out: Any
) -> Any:
    """One head of ``count`` rows as floats, from row ``first`` of the buffer or of the index on. Returns
    their address and step: in place, or widened in ``out``.
    """
    kind, address, cell_step, head_step, scales, scale_step, scale_head_step = stored
    run = address + first * cell_step + head * head_step
    if not gathered and kind == F32:
        return run, cell_step
    size = dim * 4 if kind == F32 else dim * 2 if kind in (F16, BF16) else dim
    for c in range(count):
        cell = np.int64(index[first + c, 0]) if gathered else first + c
        row, into = address + cell * cell_step + head * head_step, out + c * width * 4
        place = first + min(c + AHEAD, count - 1)
        later = np.int64(index[place, 0]) if gathered else place
        fetch(address + later * cell_step + head * head_step, 0, 1, size)
        if kind == F32:
            copy(row, cell_step, 1, dim, into, width * 4)
        else:
            of = scales + cell * scale_step + head * scale_head_step
            _read_row(kind, row, of, dim, width, ONE, into)
    return out, width * 4


@part(ARITHMETIC)
def _score_all(
    query: Any, step: Any, rows: Any, key: Any, key_step: Any, count: Any, dim: Any, weights: Any,
    value: Any, value_step: Any, v_dim: Any, ahead: Any,
) -> None:  # fmt: skip
    """Compute scores of ``rows`` queries and ``count`` keys, padded to a whole vector with -inf. Unless
    ``ahead`` is 0, meanwhile ask for the keys that many bytes on, and for the values.
    """
    each, row = CHUNK * 4, 0
    while row < rows:
        tall = TALL if row + TALL <= rows else 1
        q, w, c = query + row * step, weights + row * each, 0
        while c < count:
            wide = WIDE if c + WIDE <= count else 1
            k, out = key + c * key_step, w + c * 4
            if ahead and row == 0:
                if dim < LONG:
                    fetch(k + ahead, key_step, wide, dim * 4)
                fetch(value + c * value_step, value_step, wide, v_dim * 4)
            if tall > 1 and wide > 1:
                score_block(q, step, k, key_step, dim, out, each)
            elif wide > 1:
                score_row(q, step, k, key_step, dim, out, each)
            elif tall > 1:
                score_column(q, step, k, key_step, dim, out, each)
            else:
                score_one(q, step, k, key_step, dim, out, each)
            c += wide
        row += tall
    for r in range(rows):
        scores = _floats(weights + r * each, CHUNK)
        for c in range(count, -(-count // LANES) * LANES):
            scores[c] = NOTHING


@part(ARITHMETIC)
def _soften(scores: Any, count: Any, out: Any, width: Any, stats: Any) -> None:
    """Turn scores into weights exp(score - highest so far); ``stats`` are that highest score and the sum of
    weights.
    """
    vectors = -(-count // LANES)
    known, into = _floats(stats, 2), _floats(out, width)
    before = known[0]
    top = highest(scores, vectors, before)
    if top == NOTHING:
        top = ZERO  # gives tiny weights, instead of exp(-inf + inf)
    elif top > before:
        shrink = _exp(before - top)
        known[0] = top
        known[1] *= shrink
        for d in range(width):
            into[d] *= shrink
    known[1] += _exponentials(scores, vectors, top)


@part(ARITHMETIC)
def _add_all(
    weights: Any, rows: Any, count: Any, value: Any, value_step: Any, dim: Any, out: Any, step: Any
) -> None:
    """``out[i] += weights[i] @ values`` for ``rows`` rows and ``count`` values of ``dim`` floats."""
    each, row = CHUNK * 4, 0
    while row < rows:
        tall = 4 if row + 4 <= rows else 2 if row + 2 <= rows else 1
        at = 0
        while at < dim:
            w, v, o, left = weights + row * each, value + at * 4, out + row * step + at * 4, dim - at
            vectors = -(-left // LANES)
            if tall == 4 and vectors > 1:
                add_four_two(w, each, count, v, value_step, left, o, step)
                wide = 2
            elif tall == 4:
                add_four_one(w, each, count, v, value_step, left, o, step)
                wide = 1
            elif tall == 2 and vectors > 3:
                add_two_four(w, each, count, v, value_step, left, o, step)
                wide = 4
            elif tall == 2:
                add_two_one(w, each, count, v, value_step, left, o, step)
                wide = 1
            elif vectors > 7:
                add_one_eight(w, each, count, v, value_step, left, o, step)
                wide = 8
            elif vectors > 3:
                add_one_four(w, each, count, v, value_step, left, o, step)
                wide = 4
            elif vectors > 1:
                add_one_two(w, each, count, v, value_step, left, o, step)
                wide = 2
            else:
                add_one_one(w, each, count, v, value_step, left, o, step)
                wide = 1
            at += wide * LANES
        row += tall


@part(ARITHMETIC)
def _mark(readers: Any, first: Any, slots: Any, number: Any, piece: Any, marks: Any) -> Any:
    """Write the range of chunk ``number`` that each reader sees, and its slot, to ``marks``; returns their
    union.
    """
    low, high = (number + 1) * piece, number * piece
    for i in range(marks.shape[0]):
        begin, end = np.int64(readers[first + i, 1]), np.int64(readers[first + i, 2])
        marks[i, 2] = np.int64(slots[first + i, 0]) + number - begin // piece
        marks[i, 0], marks[i, 1] = max(begin, number * piece), min(end, (number + 1) * piece)
        if marks[i, 0] < marks[i, 1]:
            low, high = min(low, marks[i, 0]), max(high, marks[i, 1])
    return low, high


WRONG_READER, WRONG_SEGMENT = -1, -2


@kernel(TABLE, TABLE, LISTED, result=types.UniTuple(types.int64, 5), fastmath=False)
def survey(segments: Any, readers: Any, index: Any) -> Any:
    """One more than the largest row that a plan reads, or a code for an invalid row; the number of rows of
    all segments, of pairs of a reader and a row that it sees, of rows of the longest segment, and of readers
    of the most read one.
    """
    reach, seen, rows, pairs, longest, most = (
        np.int64(0), np.int64(0), np.int64(0), np.int64(0), np.int64(0), np.int64(0),
    )  # fmt: skip
    for gathered, start, length, first, stop in segments:
        if first < 0 or stop > readers.shape[0]:
            return WRONG_READER, rows, pairs, longest, most
        for i in range(first, stop):
            if not 0 <= readers[i, 1] < readers[i, 2] <= length:
                return WRONG_READER, rows, pairs, longest, most
            pairs += np.int64(readers[i, 2]) - readers[i, 1]
        count = np.int64(stop) - first
        seen, rows, longest, most = seen + count, rows + length, max(longest, length), max(most, count)
        end = np.int64(start) + length
        if start < 0 or (gathered and end > index.size):
            return WRONG_SEGMENT, rows, pairs, longest, most
        if not gathered:
            reach = max(reach, end)
    for row in index:
        if row < 0:
            return WRONG_SEGMENT, rows, pairs, longest, most
        reach = max(reach, np.int64(row) + 1)
    return reach if seen == readers.shape[0] else WRONG_READER, rows, pairs, longest, most


@part(ARITHMETIC)
def _ask(query: Any, token: Any, head: Any, group: Any, dim: Any, width: Any, scale: Any, out: Any) -> None:
    """Read the queries of a token, of ``group`` heads, as floats."""
    kind, address, step, head_step = query
    for g in range(group):
        row = address + token * step + (head + g) * head_step
        _read_row(kind, row, 0, dim, width, scale, out + g * width * 4)


@part(ARITHMETIC)
def _attend_rows(
    query: Any, rows: Any, key: Any, key_step: Any, value: Any, value_step: Any, count: Any, head_dim: Any,
    v_dim: Any, weights: Any, sums: Any, stats: Any, ahead: Any,
) -> None:  # fmt: skip
    """Attention of ``rows`` queries to ``count`` keys and values that all of them see."""
    v_width = _padded(v_dim)
    _score_all(
        query, _padded(head_dim) * 4, rows, key, key_step, count, head_dim, weights, value, value_step, v_dim,
        ahead,
    )  # fmt: skip
    for r in range(rows):
        _soften(weights + r * CHUNK * 4, count, sums + r * v_width * 4, v_width, stats + r * 8)
    _add_all(weights, rows, count, value, value_step, v_dim, sums, v_width * 4)


@part(ARITHMETIC)
def _attend_chunk(
    seen: Any, at: Any, size: Any, group: Any, queries: Any, k: Any, k_step: Any, v: Any, v_step: Any,
    head_dim: Any, v_dim: Any, weights: Any, sums: Any, stats: Any, ahead: Any,
) -> None:  # fmt: skip
    """Attention of all readers to the ``size`` rows from ``at`` on, grouped by the range that they see."""
    i, count, k_width, v_width = 0, seen.shape[0], _padded(head_dim), _padded(v_dim)
    while i < count:
        begin, end = max(seen[i, 0] - at, 0), min(seen[i, 1] - at, size)
        j = i + 1
        while j < count and begin == max(seen[j, 0] - at, 0) and end == min(seen[j, 1] - at, size):
            j += 1
        if begin < end:
            row = i * group
            _attend_rows(
                queries + row * k_width * 4, (j - i) * group, k + begin * k_step, k_step, v + begin * v_step,
                v_step, end - begin, head_dim, v_dim, weights, sums + row * v_width * 4, stats + row * 8,
                ahead if i == 0 else 0,
            )  # fmt: skip
        i = j


@part(ARITHMETIC)
def _keep(
    seen: Any, heads: Any, head: Any, group: Any, v_dim: Any, sums: Any, stats: Any, parts: Any
) -> None:
    """Store the result of each reader in its slot."""
    width = _padded(v_dim)
    for i in range(seen.shape[0]):
        if seen[i, 0] < seen[i, 1]:
            for g in range(group):
                row, place = i * group + g, parts + (seen[i, 2] * heads + head + g) * (v_dim + 2) * 4
                added, known = _floats(sums + row * width * 4, v_dim), _floats(stats + row * 8, 2)
                part = _floats(place, v_dim + 2)
                part[0], part[1] = known[0], known[1]
                for d in range(v_dim):
                    part[2 + d] = added[d]


@part(ARITHMETIC)
def _attend(
    work: Any, query: Any, scale: Any, key: Any, value: Any, parts: Any, scratch: Any, unit: Any, stop: Any
) -> None:
    kv_heads, group, head_dim, v_dim, piece = work[0], work[1], work[2], work[3], work[4]
    given, tasks, segments = work[5], _integers(work[5], work[6], 4), _integers(work[7], work[8], 5)
    readers, slots = _integers(work[9], work[10], 3), _integers(work[11], work[10], 1)
    index, most = _integers(work[12], work[13], 1), work[14]
    k_width, v_width = _padded(head_dim), _padded(v_dim)
    marks = carray(to_places(scratch), (most, 3))
    keys = (scratch + most * 24 + 63) // 64 * 64
    values = keys + CHUNK * k_width * 4
    weights = values + CHUNK * v_width * 4
    read = np.int64(0)
    for i in range(segments.shape[0]):
        read += segments[i, 2]
    large = read * kv_heads * (head_dim + v_dim) * 4 > CACHED
    early = AHEAD_IN_PLACE if head_dim >= SHORT or large else 0
    while unit < stop:
        task, kv_head = unit // kv_heads, unit % kv_heads
        if given:
            segment, number = np.int64(tasks[task, 0]), np.int64(tasks[task, 3])
            first, last = np.int64(tasks[task, 1]), np.int64(tasks[task, 2])
        else:
            segment, number = task, np.int64(0)
            first, last = np.int64(segments[task, 3]), np.int64(segments[task, 4])
        gathered, start = segments[segment, 0], np.int64(segments[segment, 1])
        seen, rows = marks[: last - first], (last - first) * group
        low, high = _mark(readers, first, slots, number, piece, seen)
        queries = weights + rows * CHUNK * 4
        sums = queries + rows * k_width * 4
        stats = sums + rows * v_width * 4
        for i in range(last - first):
            token, into = np.int64(readers[first + i, 0]), queries + i * group * k_width * 4
            _ask(query, token, kv_head * group, group, head_dim, k_width, scale, into)
        cleared, known = _floats(sums, rows * v_width), _floats(stats, rows * 2)
        for d in range(cleared.size):
            cleared[d] = ZERO
        for r in range(rows):
            known[2 * r], known[2 * r + 1] = NOTHING, ZERO
        for at in range(low, high, CHUNK):
            size = min(CHUNK, high - at)
            k, k_step = _rows(key, kv_head, head_dim, k_width, index, gathered, start + at, size, keys)
            v, v_step = _rows(value, kv_head, v_dim, v_width, index, gathered, start + at, size, values)
            ahead = early * k_step if k != keys else 0
            _attend_chunk(
                seen, at, size, group, queries, k, k_step, v, v_step, head_dim, v_dim, weights, sums, stats,
                ahead,
            )  # fmt: skip
        _keep(seen, kv_heads * group, kv_head * group, group, v_dim, sums, stats, parts)
        unit += 1


@part(ARITHMETIC)
def _merge(work: Any, parts: Any, sinks: Any, out: Any) -> None:
    """Merge the slots ``[edges[q], edges[q + 1])`` of each query q into ``out``."""
    heads, v_dim, tokens = work[0] * work[1], work[3], work[16]
    edges, step = _integers(work[15], tokens + 1, 1), (v_dim + 2) * 4
    for token in range(tokens):
        first, last = np.int64(edges[token, 0]), np.int64(edges[token + 1, 0])
        for head in range(heads):
            top, total = NOTHING, ZERO
            for slot in range(first, last):
                top = max(top, _floats(parts + (slot * heads + head) * step, 1)[0])
            if sinks:
                sink = _floats(sinks, heads)[head]
                if sink > NOTHING:
                    top = max(top, sink)
                    total = _exp(sink - top)
            into = _floats(out + (token * heads + head) * v_dim * 4, v_dim)
            for d in range(v_dim):
                into[d] = ZERO
            for slot in range(first, last):
                part = _floats(parts + (slot * heads + head) * step, v_dim + 2)
                if part[0] > NOTHING or part[1] != ZERO:
                    weight = _exp(part[0] - top)
                    total += weight * part[1]
                    for d in range(v_dim):
                        into[d] += weight * part[2 + d]
            for d in range(v_dim):
                into[d] /= total


PLACE, FOUR, STORED = types.int64, types.UniTuple(types.int64, 4), types.UniTuple(types.int64, 7)


@kernel(PLACE, FOUR, types.float32, STORED, STORED, *[PLACE] * 6, fastmath=ARITHMETIC)
def attend(
    work: Any, query: Any, scale: Any, key: Any, value: Any, sinks: Any, parts: Any, scratch: Any, unit: Any,
    stop: Any, out: Any,
) -> None:  # fmt: skip
    """Units ``[unit, stop)`` of work: unit ``i * kv_heads + h`` is KV head h of task i; then, unless ``out``
    is 0, merge what all units have left in ``parts``.

    work: the address of kv_heads, query heads of each, head_dim, v_dim and the rows of a chunk; then of the
    plan's arrays, divided as in ``ragged_kernel.Launch``: the address and number of tasks (address 0: each
    segment is one), of segments and of readers, the address of slots, that of the index and its number, the
    most readers of a task, the address of edges, and the number of tokens.

    query: its kind, address, and steps of a token and of a head; it is multiplied by ``scale``. key and
    value: kind, address, steps of a row and of a head; for codes the same three of their scales (F16), else
    zeros. sinks, F32 (heads,), take part in the softmax; 0 for none. out: F32 (tokens, heads, v_dim).

    ``parts`` (all slots, heads, 2 + v_dim): the highest score of each slot, its sum of weights, and its
    weighted sum of values. ``scratch`` is memory for what ``cpu_attention.scratch_size`` says.
    """
    given = carray(to_places(work), (17,))
    _attend(given, query, scale, key, value, parts, scratch, unit, stop)
    if out:
        _merge(given, parts, sinks, out)
