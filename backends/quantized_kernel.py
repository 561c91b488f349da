"""Kernels over codes of Q8_0 and Q4_0 on arrays in host memory, compiled by numba when this is imported.

The first import on a machine compiles for a few seconds; numba keeps the result beside this file or, where
that cannot be written, in the user's cache folder, by processor and version. Where neither can be written,
each process compiles.

Attention goes over a run of cells per KV head in chunks that stay in the processor's first cache: their keys
are widened to floats once for all queries of all heads that read them, then the values, with a softmax that
goes along (Dao et al., FlashAttention, 2022). All is F32. ``ARITHMETIC`` lets sums be taken in any order;
NaN and infinity are what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["CHUNK", "attend", "merge", "store"]

CHUNK = 64
"""Cells whose keys or values are there as floats at a time."""
ARITHMETIC = {"reassoc", "contract", "nsz"}
EXACT = {"contract"}
"""Not the empty set, for which numba takes what the caller has."""
LANES = 16
"""Floats of a vector: half a block. Processors with shorter ones take it in parts."""
BYTE, INT32, FLOAT = ir.IntType(8), ir.IntType(32), ir.FloatType()
SMALLEST = np.float32(-87.0)
LOG2_E = np.float32(1.4426950408889634)
ROUNDING = np.float32(12582912.0)
"""1.5 * 2^23: what is added to it is rounded to a whole number, which its low bits then are."""
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
ZERO, ONE, HALF, NOTHING = np.float32(0), np.float32(1), np.float32(0.5), np.float32(-np.inf)

ROWS = types.Array(types.float32, 3, "C")
GIVEN = types.Array(types.float32, 3, "C", readonly=True)
CODES = (
    types.Array(types.int8, 3, "A", readonly=True),
    types.Array(types.uint16, 3, "A", readonly=True),
    types.int64,
)
INTO = types.Array(types.int8, 3, "A"), types.Array(types.uint16, 3, "A"), types.int64
LISTED = types.Array(types.int32, 1, "C", readonly=True)
TABLE = types.Array(types.int32, 2, "C", readonly=True)
SCRATCH = types.Array(types.float32, 2, "C")
SINKS = types.Array(types.float32, 1, "C", readonly=True)


def _part(fastmath: Any) -> Callable[[Any], Any]:
    """What kernels are made of."""
    made: Callable[[Any], Any] = njit(error_model="numpy", fastmath=fastmath)
    return made


def _kernel(*given: Any, fastmath: Any) -> Callable[[Any], Any]:
    """For arguments of these types: compiled at once, or read from where it was kept."""

    def decorate(function: Any) -> Any:
        options = {"nogil": True, "error_model": "numpy", "fastmath": fastmath}
        try:
            return njit(types.void(*given), cache=True, **options)(function)
        except (RuntimeError, OSError):  # no folder to keep it in, or no room there
            return njit(types.void(*given), **options)(function)

    return decorate


def _pointer(context: Any, builder: Any, kind: Any, array: Any, places: list[Any]) -> Any:
    """The address in an array of what lies at ``places``, as bytes; its last axis is contiguous."""
    found = context.make_array(kind)(context, builder, array)
    at = builder.bitcast(found.data, BYTE.as_pointer())
    for axis, place in enumerate(places):
        step = builder.extract_value(found.strides, axis)
        at = builder.gep(at, [builder.mul(place, step)])
    return at


class _Lanes:
    """Vectors of a type, which is no more aligned than its elements are."""

    def __init__(self, element: Any, count: int, align: int) -> None:
        self.type, self.count, self.align = ir.VectorType(element, count), count, align
        self.undefined = ir.Constant(self.type, ir.Undefined)

    def load(self, builder: Any, at: Any, place: Any) -> Any:
        pointer = builder.bitcast(builder.gep(at, [place]), self.type.as_pointer())
        return builder.load(pointer, align=self.align)

    def store(self, builder: Any, vector: Any, at: Any, place: Any) -> None:
        pointer = builder.bitcast(builder.gep(at, [place]), self.type.as_pointer())
        builder.store(vector, pointer, align=self.align)

    def all(self, value: int) -> Any:
        return ir.Constant(self.type, [value] * self.count)

    def spread(self, builder: Any, number: Any) -> Any:
        """``number`` in each lane."""
        one = builder.insert_element(self.undefined, number, ir.Constant(INT32, 0))
        lanes = ir.Constant(ir.VectorType(INT32, self.count), [0] * self.count)
        return builder.shuffle_vector(one, self.undefined, lanes)


BYTES, FLOATS = _Lanes(BYTE, LANES, 1), _Lanes(FLOAT, LANES, 4)


def _number(value: int) -> Any:
    return ir.Constant(ir.IntType(64), value)


def _widening(bits: int) -> Any:
    @intrinsic
    def widen(
        typing: Any, codes: Any, cell: Any, head: Any, block: Any, scale: Any, out: Any, row: Any
    ) -> Any:
        """``out[row]`` from value 32 * block on: 32 codes of ``codes[cell, head]``, times scale.

        Those of 4 bits are two in a byte: the low halves come first; they count from -8.
        """

        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            codes, cell, head, block, scale, out, row = given
            read = _pointer(context, builder, signature.args[0], codes, [cell, head])
            into = _pointer(context, builder, signature.args[5], out, [row])
            first, step = builder.mul(block, _number(4 * bits)), _number(LANES)
            if bits == 4:
                pairs = BYTES.load(builder, read, first)
                halves = builder.and_(pairs, BYTES.all(15)), builder.lshr(pairs, BYTES.all(4))
                found = [builder.sub(half, BYTES.all(8)) for half in halves]
            else:
                found = [BYTES.load(builder, read, at) for at in (first, builder.add(first, step))]
            for half, part in enumerate(found):
                wide = builder.fmul(builder.sitofp(part, FLOATS.type), FLOATS.spread(builder, scale))
                at = builder.add(builder.mul(block, _number(32 * 4)), _number(half * LANES * 4))
                FLOATS.store(builder, wide, into, at)
            return context.get_dummy_value()

        place = types.int64
        return types.void(codes, place, place, place, types.float32, out, place), generate

    return widen


def _added(builder: Any, total: Any, one: Any, other: Any) -> Any:
    """total + one * other, in one rounding where the processor has that."""
    return builder.fadd(total, builder.fmul(one, other, flags=["contract"]), flags=["contract"])


def _scoring(heads: int) -> Any:
    @intrinsic
    def score(typing: Any, query: Any, head: Any, keys: Any, cell: Any, weights: Any, row: Any) -> Any:
        """``weights[row + i, cell] = query[head + i] @ keys[cell]`` for i in range(heads)."""

        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            query, head, keys, cell, weights, row = given
            kinds, width = signature.args, LANES * 4
            size = builder.extract_value(context.make_array(kinds[2])(context, builder, keys).shape, 1)
            key = _pointer(context, builder, kinds[2], keys, [cell])
            rows = [
                _pointer(context, builder, kinds[0], query, [builder.add(head, _number(i))])
                for i in range(heads)
            ]
            sums = [cgutils.alloca_once_value(builder, FLOATS.all(0)) for _ in rows]
            for total in sums:
                builder.store(FLOATS.all(0), total)
            with cgutils.for_range(builder, builder.udiv(size, _number(LANES))) as loop:
                at = builder.mul(loop.index, _number(width))
                k = FLOATS.load(builder, key, at)
                for total, asking in zip(sums, rows, strict=True):
                    builder.store(
                        _added(builder, builder.load(total), k, FLOATS.load(builder, asking, at)), total
                    )
            kind = ir.FunctionType(FLOAT, [FLOAT, FLOATS.type])
            add_up = cgutils.get_or_insert_function(
                builder.module, kind, f"llvm.vector.reduce.fadd.v{LANES}f32"
            )
            for i, total in enumerate(sums):
                found = builder.call(
                    add_up, [ir.Constant(FLOAT, 0.0), builder.load(total)], fastmath=["reassoc"]
                )
                into = _pointer(context, builder, kinds[4], weights, [builder.add(row, _number(i)), cell])
                builder.store(found, builder.bitcast(into, FLOAT.as_pointer()))
            return context.get_dummy_value()

        place = types.int64
        return types.void(query, place, keys, place, weights, place), generate

    return score


def _adding(cells: int) -> Any:
    @intrinsic
    def add(typing: Any, weights: Any, values: Any, cell: Any, out: Any) -> Any:
        """``out += weights[cell : cell + cells] @ values[cell : cell + cells]``."""

        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            weights, values, cell, out = given
            kinds = signature.args
            size = builder.extract_value(context.make_array(kinds[1])(context, builder, values).shape, 1)
            places = [builder.add(cell, _number(i)) for i in range(cells)]
            rows = [_pointer(context, builder, kinds[1], values, [place]) for place in places]
            each = [_pointer(context, builder, kinds[0], weights, [place]) for place in places]
            shares = [
                FLOATS.spread(builder, builder.load(builder.bitcast(w, FLOAT.as_pointer()))) for w in each
            ]
            into = _pointer(context, builder, kinds[3], out, [])
            with cgutils.for_range(builder, builder.udiv(size, _number(LANES))) as loop:
                at = builder.mul(loop.index, _number(LANES * 4))
                total = FLOATS.load(builder, into, at)
                for share, row in zip(shares, rows, strict=True):
                    total = _added(builder, total, share, FLOATS.load(builder, row, at))
                FLOATS.store(builder, total, into, at)
            return context.get_dummy_value()

        return types.void(weights, values, types.int64, out), generate

    return add


_widen_four, _widen_eight = _widening(4), _widening(8)
_score_one, _score_four = _scoring(1), _scoring(4)
_add_one, _add_eight = _adding(1), _adding(8)


@_part(EXACT)
def _from_half(bits: Any) -> Any:
    """The F32 of an F16's bits."""
    wide = np.int32((np.int32(bits) & np.int32(0x7FFF)) << np.int32(13))
    found = np.int32(wide).view(np.float32) * np.float32(2.0**112)
    if (bits & 0x7C00) == 0x7C00:
        found = np.int32(wide | np.int32(0x7F800000)).view(np.float32)
    return -found if bits & 0x8000 else found


@_part(EXACT)
def _exp(x: Any) -> Any:
    """exp of x <= 0; what is below ``SMALLEST`` counts as that. Within 2 units in the last place."""
    x = SMALLEST if x < SMALLEST else x
    shifted = x * LOG2_E + ROUNDING
    whole = shifted - ROUNDING
    r = x - whole * LN2_HIGH
    r = r - whole * LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * (r * r) + r + ONE
    power = np.int32((np.float32(shifted).view(np.int32) + np.int32(127 - 0x4B400000)) << np.int32(23))
    return p * np.int32(power).view(np.float32)


@_part(ARITHMETIC)
def _read(codes: Any, scales: Any, bits: Any, cell: Any, head: Any, out: Any, row: Any) -> None:
    """One head of a cell as floats, ``out[row]``."""
    if bits == 4:
        for block in range(scales.shape[2]):
            _widen_four(codes, cell, head, block, _from_half(scales[cell, head, block]), out, row)
    else:
        for block in range(scales.shape[2]):
            _widen_eight(codes, cell, head, block, _from_half(scales[cell, head, block]), out, row)


@_part(ARITHMETIC)
def _cell(index: Any, gathered: Any, place: Any) -> Any:
    return np.int64(index[place]) if gathered else np.int64(place)


@_part(ARITHMETIC)
def _soften(scores: Any, out: Any, total: Any) -> None:
    """Scores become weights exp(score - highest so far); ``total`` is that highest, and their sum."""
    top = total[0]
    for c in range(scores.size):
        top = max(top, scores[c])
    if top == NOTHING:
        top = ZERO  # weights of next to nothing, not exp(-inf + inf)
    elif top > total[0]:
        shrink = _exp(total[0] - top)
        total[0] = top
        total[1] *= shrink
        for d in range(out.size):
            out[d] *= shrink
    added = ZERO
    for c in range(scores.size):
        weight = _exp(scores[c] - top)
        scores[c] = weight
        added += weight
    total[1] += added


@_part(ARITHMETIC)
def _add_values(weights: Any, values: Any, begin: Any, end: Any, out: Any) -> None:
    cell = begin
    while cell + 8 <= end:
        _add_eight(weights, values, cell, out)
        cell += 8
    while cell < end:
        _add_one(weights, values, cell, out)
        cell += 1


@_part(ARITHMETIC)
def _score_all(
    query: Any, head: Any, group: Any, keys: Any, begin: Any, end: Any, weights: Any, row: Any
) -> None:
    """Scores of the heads from ``head`` on, one row of ``weights`` each."""
    g = 0
    while g + 4 <= group:
        for cell in range(begin, end):
            _score_four(query, head + g, keys, cell, weights, row + g)
        g += 4
    while g < group:
        for cell in range(begin, end):
            _score_one(query, head + g, keys, cell, weights, row + g)
        g += 1


@_part(ARITHMETIC)
def _mark(readers: Any, first: Any, slots: Any, number: Any, piece: Any, marks: Any) -> Any:
    """What of chunk ``number`` each reader sees and its slot, one row of ``marks`` each; what any sees."""
    low, high = (number + 1) * piece, number * piece
    for i in range(marks.shape[0]):
        begin, end = np.int64(readers[first + i, 1]), np.int64(readers[first + i, 2])
        marks[i, 2] = slots[first + i] + number - begin // piece
        marks[i, 0], marks[i, 1] = max(begin, number * piece), min(end, (number + 1) * piece)
        if marks[i, 0] < marks[i, 1]:
            low, high = min(low, marks[i, 0]), max(high, marks[i, 1])
    return low, high


@_part(ARITHMETIC)
def _clear(parts: Any, totals: Any, marks: Any, first: Any, stop: Any) -> None:
    """Have heads ``[first, stop)`` of the slots that are in use begin with nothing."""
    for i in range(marks.shape[0]):
        if marks[i, 0] < marks[i, 1]:
            for head in range(first, stop):
                parts[marks[i, 2], head, :] = ZERO
                totals[marks[i, 2], head, 0], totals[marks[i, 2], head, 1] = NOTHING, ZERO


@_part(ARITHMETIC)
def _attend_keys(
    query: Any, readers: Any, first: Any, marks: Any, place: Any, size: Any, head: Any, group: Any,
    keys: Any, weights: Any, parts: Any, totals: Any,
) -> None:  # fmt: skip
    """Weights of ``size`` keys from ``place`` on, for readers from ``first`` on, ``group`` heads of each."""
    for i in range(marks.shape[0]):
        begin, end = max(marks[i, 0] - place, 0), min(marks[i, 1] - place, size)
        if begin < end:
            _score_all(query[readers[first + i, 0]], head, group, keys, begin, end, weights, i * group)
            for g in range(group):
                slot, scores = marks[i, 2], weights[i * group + g, begin:end]
                _soften(scores, parts[slot, head + g], totals[slot, head + g])


@_kernel(
    GIVEN, *CODES, *CODES, *[TABLE] * 3, *[LISTED] * 2, types.int64, ROWS, ROWS, *[SCRATCH] * 3,
    types.Array(types.int64, 2, "C"), types.int64, types.int64, fastmath=ARITHMETIC,
)  # fmt: skip
def attend(
    query: Any, k_codes: Any, k_scales: Any, k_bits: Any, v_codes: Any, v_scales: Any, v_bits: Any,
    tasks: Any, segments: Any, readers: Any, slots: Any, index: Any, piece: Any, parts: Any, totals: Any,
    keys: Any, values: Any, weights: Any, marks: Any, unit: Any, stop: Any,
) -> None:  # fmt: skip
    """Units ``[unit, stop)`` of work: unit ``i * kv_heads + h`` is KV head h of task i.

    query (tokens, heads, head_dim) is scaled; codes I8 (cells, kv_heads, bytes), contiguous along their
    last axis, and scales as U16 (cells, kv_heads, blocks); ``bits`` are 8 or 4. segments, readers and index
    are the plan's; tasks, slots and ``piece``, the rows of a chunk, are as ``ragged_kernel.Launch`` says.
    Into ``parts`` (all slots, heads, v_dim) goes what the values of a slot add up to, and into ``totals``
    (all slots, heads, 2) the highest score and the sum of the weights.

    What is written over: keys (CHUNK, head_dim), values (CHUNK, v_dim), weights (most readers of a task
    * query heads of a KV head, CHUNK), marks (most readers, 3).
    """
    kv_heads = k_codes.shape[1]
    group = query.shape[1] // kv_heads
    while unit < stop:
        segment, first, last, number = tasks[unit // kv_heads]
        kv_head, gathered, start = unit % kv_heads, segments[segment, 0], segments[segment, 1]
        head, used = kv_head * group, marks[: last - first]
        low, high = _mark(readers, first, slots, np.int64(number), piece, used)
        _clear(parts, totals, used, head, head + group)
        for place in range(low, high, CHUNK):
            size = min(CHUNK, high - place)
            for c in range(size):
                cell = _cell(index, gathered, start + place + c)
                _read(k_codes, k_scales, k_bits, cell, kv_head, keys, c)
            _attend_keys(query, readers, first, used, place, size, head, group, keys, weights, parts, totals)
            for c in range(size):
                cell = _cell(index, gathered, start + place + c)
                _read(v_codes, v_scales, v_bits, cell, kv_head, values, c)
            for i in range(last - first):
                begin, end = max(used[i, 0] - place, 0), min(used[i, 1] - place, size)
                for g in range(group):
                    _add_values(weights[i * group + g], values, begin, end, parts[used[i, 2], head + g])
        unit += 1


@_kernel(ROWS, ROWS, LISTED, SINKS, ROWS, fastmath=ARITHMETIC)
def merge(parts: Any, totals: Any, edges: Any, sinks: Any, out: Any) -> None:
    """``out`` (tokens, heads, v_dim): of query q the slots ``[edges[q], edges[q + 1])`` in one.

    Sinks (heads,) take part in the softmax; none: an empty array.
    """
    for token in range(out.shape[0]):
        for head in range(out.shape[1]):
            top, total = NOTHING, ZERO
            for slot in range(edges[token], edges[token + 1]):
                top = max(top, totals[slot, head, 0])
            if sinks.size and sinks[head] > NOTHING:
                top = max(top, sinks[head])
                total = _exp(sinks[head] - top)
            into = out[token, head]
            into[:] = ZERO
            for slot in range(edges[token], edges[token + 1]):
                if totals[slot, head, 0] > NOTHING or totals[slot, head, 1] != ZERO:
                    weight = _exp(totals[slot, head, 0] - top)
                    total += weight * totals[slot, head, 1]
                    found = parts[slot, head]
                    for d in range(into.size):
                        into[d] += weight * found[d]
            for d in range(into.size):
                into[d] /= total


@_part(False)
def _to_half(x: Any) -> Any:
    """The bits of x as F16, rounded to even."""
    bits = np.int32(np.float32(x).view(np.int32))
    sign, bits = np.int32((bits >> 16) & 0x8000), np.int32(bits & 0x7FFFFFFF)
    if bits > 0x7F800000:
        found = np.int32(0x7E00)
    elif bits >= 0x477FF000:  # 65520, which is rounded to what F16 has no more
        found = np.int32(0x7C00)
    elif bits < 0x38800000:  # 2^-14: below it steps are of one size, which adding 1/2 leaves of it
        found = np.int32(np.float32(np.int32(bits).view(np.float32) + HALF).view(np.int32) - 0x3F000000)
    else:
        found = np.int32((bits - 0x38000000 + 0xFFF + ((bits >> 13) & 1)) >> 13)
    return np.uint16(found | sign)


@_part(False)
def _magnitude(x: Any) -> Any:
    """A whole number that grows with |x|; NaN is above all."""
    return np.int32(np.float32(x).view(np.int32) & np.int32(0x7FFFFFFF))


@_part(False)
def _store_eight(source: Any, first: Any, stop: Any, codes: Any) -> Any:
    top = np.int32(0)
    for j in range(first, stop):
        top = max(top, _magnitude(source[j]))
    scale = np.int32(top).view(np.float32) * np.float32(1 / 127)
    inverse = ONE / scale if scale != ZERO else ZERO
    for j in range(first, stop):
        x = source[j] * inverse
        codes[j] = np.int8(np.int32(x + (HALF if x >= ZERO else -HALF)))
    return _to_half(scale)


@_part(False)
def _store_four(source: Any, first: Any, stop: Any, codes: Any) -> Any:
    top, peak = np.int32(-1), ZERO
    for j in range(first, stop):
        size = _magnitude(source[j])
        if size > top:
            top, peak = size, source[j]
    scale = peak * np.float32(-1 / 8)
    inverse = ONE / scale if scale != ZERO else ZERO
    half = (stop - first) // 2
    for j in range(half):
        low = min(max(source[first + j] * inverse + np.float32(8.5), ZERO), np.float32(15))
        high = min(max(source[first + half + j] * inverse + np.float32(8.5), ZERO), np.float32(15))
        codes[first // 2 + j] = np.int8(np.int32(low) | (np.int32(high) << 4))
    return _to_half(scale)


@_kernel(GIVEN, *INTO, types.int64, fastmath=False)
def store(source: Any, codes: Any, scales: Any, bits: Any, cell: Any) -> None:
    """Codes and scales of floats (tokens, kv_heads, dim) into the cells from ``cell`` on.

    Bit for bit GGML's quantize_row_q8_0_ref and quantize_row_q4_0_ref (ggml/src/ggml-quants.c): each product
    is rounded. Of a block that holds NaN or infinity the scale is not finite, and the codes are any.
    """
    size = (
        source.shape[2] // scales.shape[2]
    )  # 32; where a compiler knows it, it makes more code and no faster
    for token in range(source.shape[0]):
        for head in range(source.shape[1]):
            given, into = source[token, head], codes[cell + token, head]
            for block in range(scales.shape[2]):
                first, stop = block * size, (block + 1) * size
                if bits == 4:
                    found = _store_four(given, first, stop, into)
                else:
                    found = _store_eight(given, first, stop, into)
                scales[cell + token, head, block] = found
