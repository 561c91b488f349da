"""Attention by a plan over host memory, compiled by numba when this is imported.

Attention goes over the rows of a segment per KV head in chunks that stay in the processor's cache, for all
queries of all heads that read them, with a softmax that goes along (Dao et al., FlashAttention, 2022).
Plain F32 rows are read where they lie; others are widened to F32 first, once for all queries. All is F32.
``ARITHMETIC`` lets sums be taken in any order; NaN and infinity are what they are.

Of memory kernels are given addresses and steps in bytes, as integers: the caller has checked both, and keeps
what lies there alive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from backends.cpu_attention import BLOCK, KINDS
from backends.numba_options import kernel, part

__all__ = ["attend", "merge", "scratch_size"]

CHUNK = 128
"""Rows whose scores are there at a time."""
F32, F16, BF16, Q8, Q4 = KINDS.values()
LANES = 16 if binding.get_host_cpu_features().get("avx512f") else 8
"""Floats of a vector. Processors with shorter ones take it in parts."""
TALL = 4 if LANES == 16 else 2
"""Queries whose products with ``WIDE`` keys are summed in registers."""
WIDE = 4
ARITHMETIC = {"reassoc", "contract", "nsz"}
EXACT = {"contract"}
"""Not the empty set, for which numba takes what the caller has."""
BYTE, INT32, INT64, FLOAT = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
SMALLEST = np.float32(-87.0)
LOG2_E = np.float32(1.4426950408889634)
ROUNDING = np.float32(12582912.0)
"""1.5 * 2^23: what is added to it is rounded to a whole number, which its low bits then are."""
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
POLYNOMIAL = tuple(
    np.float32(x)
    for x in (
        1.9875691500e-4,
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    )
)
"""Of exp(x) - 1 - x, over x^2, for |x| up to half of log 2."""
EXPONENT = 127 - 0x4B400000
ZERO, ONE, HALF, NOTHING = np.float32(0), np.float32(1), np.float32(0.5), np.float32(-np.inf)

place = types.int64
"""An address, a step in bytes, or a count."""
LISTED = types.Array(types.int32, 1, "C", readonly=True)
TABLE = types.Array(types.int32, 2, "C", readonly=True)
ROWS = types.Array(types.float32, 3, "C")
SINKS = types.Array(types.float32, 1, "C", readonly=True)


# Vectors in LLVM's words.


class _Vectors:
    """Vectors of a type in memory, which is no more aligned than its elements are."""

    def __init__(self, element: Any, count: int, align: int) -> None:
        self.type, self.count, self.align = ir.VectorType(element, count), count, align
        self.undefined = ir.Constant(self.type, ir.Undefined)

    def load(self, builder: Any, address: Any) -> Any:
        return builder.load(builder.inttoptr(address, self.type.as_pointer()), align=self.align)

    def store(self, builder: Any, vector: Any, address: Any) -> None:
        builder.store(vector, builder.inttoptr(address, self.type.as_pointer()), align=self.align)

    def all(self, value: Any) -> Any:
        return ir.Constant(self.type, [value] * self.count)

    def spread(self, builder: Any, number: Any) -> Any:
        """``number`` in each lane."""
        one = builder.insert_element(self.undefined, number, ir.Constant(INT32, 0))
        return _shuffled(builder, one, self.undefined, [0] * self.count)


FLOATS = _Vectors(FLOAT, LANES, 4)
CODES, WIDENED = _Vectors(BYTE, 16, 1), _Vectors(FLOAT, 16, 4)


def _shuffled(builder: Any, one: Any, other: Any, lanes: Sequence[int]) -> Any:
    return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(INT32, len(lanes)), list(lanes)))


def _number(value: int) -> Any:
    return ir.Constant(INT64, value)


def _float(builder: Any, address: Any) -> Any:
    return builder.load(builder.inttoptr(address, FLOAT.as_pointer()))


def _added(builder: Any, total: Any, one: Any, other: Any) -> Any:
    """total + one * other, in one rounding where the processor has that."""
    return builder.fadd(total, builder.fmul(one, other, flags=["contract"]), flags=["contract"])


def _stepping(builder: Any, address: Any, step: Any, count: int) -> list[Any]:
    """``count`` addresses, ``step`` apart."""
    return [builder.add(address, builder.mul(step, _number(i))) for i in range(count)]


def _kept(builder: Any, count: int) -> list[Any]:
    """Vectors of zeros that a loop adds to; LLVM makes registers of them."""
    found = [cgutils.alloca_once(builder, FLOATS.type) for _ in range(count)]
    for one in found:
        builder.store(FLOATS.all(0), one)
    return found


def _halved(builder: Any, vector: Any) -> Any:
    """Of 16 lanes the sums of lanes 8 apart; of 8 themselves."""
    if vector.type.count == 8:
        return vector
    low, high = (_shuffled(builder, vector, vector, range(at, at + 8)) for at in (0, 8))
    return builder.fadd(low, high)


def _sums(builder: Any, vectors: Sequence[Any]) -> Any:
    """A vector of four: the sum of the lanes of each of four."""

    def paired(one: Any, other: Any) -> Any:  # as the processor's own horizontal sum has it
        even = _shuffled(builder, one, other, [0, 2, 8, 10, 4, 6, 12, 14])
        return builder.fadd(even, _shuffled(builder, one, other, [1, 3, 9, 11, 5, 7, 13, 15]))

    first, second, third, fourth = (_halved(builder, vector) for vector in vectors)
    both = paired(paired(first, second), paired(third, fourth))
    low, high = (_shuffled(builder, both, both, range(at, at + 4)) for at in (0, 4))
    return builder.fadd(low, high)


def _folded(builder: Any, vector: Any, fold: Callable[[Any, Any], Any]) -> Any:
    """All lanes in one number."""
    while (half := vector.type.count // 2) > 0:
        low, high = (_shuffled(builder, vector, vector, range(at, at + half)) for at in (0, half))
        vector = fold(low, high)
    return builder.extract_element(vector, ir.Constant(INT32, 0))


def _scoring(tall: int, wide: int) -> Any:
    @intrinsic
    def score(
        typing: Any, query: Any, query_step: Any, key: Any, key_step: Any, width: Any, out: Any, out_step: Any
    ) -> Any:
        """Products of ``tall`` queries with ``wide`` keys of ``width`` floats: ``out[i, j] = q[i] @ k[j]``."""

        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            query, query_step, key, key_step, width, out, out_step = given
            queries = _stepping(builder, query, query_step, tall)
            keys = _stepping(builder, key, key_step, wide)
            sums = _kept(builder, tall * wide)
            with cgutils.for_range(builder, builder.udiv(width, _number(LANES))) as loop:
                at = builder.mul(loop.index, _number(LANES * 4))
                ks = [FLOATS.load(builder, builder.add(one, at)) for one in keys]
                for i in range(tall):
                    q = FLOATS.load(builder, builder.add(queries[i], at))
                    for k, total in zip(ks, sums[i * wide : (i + 1) * wide], strict=True):
                        builder.store(_added(builder, builder.load(total), q, k), total)
            for i, into in enumerate(_stepping(builder, out, out_step, tall)):
                found = [builder.load(total) for total in sums[i * wide : (i + 1) * wide]]
                if wide == 4:
                    whole = _sums(builder, found)
                    builder.store(whole, builder.inttoptr(into, whole.type.as_pointer()), align=4)
                else:
                    (one,) = found
                    total = _folded(builder, one, builder.fadd)
                    builder.store(total, builder.inttoptr(into, FLOAT.as_pointer()))
            return context.get_dummy_value()

        return types.void(*[place] * 7), generate

    return score


def _adding(tall: int, wide: int) -> Any:
    @intrinsic
    def add(
        typing: Any, weight: Any, weight_step: Any, count: Any, value: Any, value_step: Any, out: Any,
        out_step: Any,
    ) -> Any:  # fmt: skip
        """``out[i] += sum(weight[i, j] * value[j] for j in range(count))``: ``tall`` rows, ``wide`` vectors."""

        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            weight, weight_step, count, value, value_step, out, out_step = given
            weights = _stepping(builder, weight, weight_step, tall)
            parts = [_number(LANES * 4 * n) for n in range(wide)]
            places = [
                builder.add(row, part)
                for row in _stepping(builder, out, out_step, tall)
                for part in parts
            ]
            sums = _kept(builder, tall * wide)
            for total, at in zip(sums, places, strict=True):
                builder.store(FLOATS.load(builder, at), total)
            with cgutils.for_range(builder, count) as loop:
                row = builder.add(value, builder.mul(loop.index, value_step))
                vs = [FLOATS.load(builder, builder.add(row, part)) for part in parts]
                at = builder.mul(loop.index, _number(4))
                for i in range(tall):
                    share = FLOATS.spread(builder, _float(builder, builder.add(weights[i], at)))
                    for v, total in zip(vs, sums[i * wide : (i + 1) * wide], strict=True):
                        builder.store(_added(builder, builder.load(total), share, v), total)
            for total, at in zip(sums, places, strict=True):
                FLOATS.store(builder, builder.load(total), at)
            return context.get_dummy_value()

        return types.void(*[place] * 7), generate

    return add


@intrinsic
def _highest(typing: Any, scores: Any, count: Any, start: Any) -> Any:
    """The highest of ``start`` and ``count`` vectors of scores; NaN is none."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        scores, count, start = given

        def higher(one: Any, other: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", other, one), other, one)

        top = cgutils.alloca_once(builder, FLOATS.type)
        builder.store(FLOATS.spread(builder, start), top)
        with cgutils.for_range(builder, count) as loop:
            at = builder.add(scores, builder.mul(loop.index, _number(LANES * 4)))
            builder.store(higher(builder.load(top), FLOATS.load(builder, at)), top)
        return _folded(builder, builder.load(top), higher)

    return types.float32(place, place, types.float32), generate


@intrinsic
def _exponentials_of(typing: Any, scores: Any, count: Any, top: Any) -> Any:
    """``count`` vectors of scores become exp(score - top), as ``_exp`` has it; their sum."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        scores, count, top = given
        all_ = FLOATS.all
        (total,) = _kept(builder, 1)
        highest = FLOATS.spread(builder, top)
        with cgutils.for_range(builder, count) as loop:
            at = builder.add(scores, builder.mul(loop.index, _number(LANES * 4)))
            x = builder.fsub(FLOATS.load(builder, at), highest)
            x = builder.select(builder.fcmp_ordered("<", x, all_(SMALLEST)), all_(SMALLEST), x)
            shifted = _added(builder, all_(ROUNDING), x, all_(LOG2_E))
            whole = builder.fsub(shifted, all_(ROUNDING))
            r = _added(builder, x, whole, all_(-LN2_HIGH))
            r = _added(builder, r, whole, all_(-LN2_LOW))
            p = all_(POLYNOMIAL[0])
            for coefficient in POLYNOMIAL[1:]:
                p = _added(builder, all_(coefficient), p, r)
            p = builder.fadd(_added(builder, r, p, builder.fmul(r, r)), all_(ONE))
            whole_bits = ir.VectorType(INT32, LANES)
            power = builder.add(builder.bitcast(shifted, whole_bits), ir.Constant(whole_bits, [EXPONENT] * LANES))
            power = builder.shl(power, ir.Constant(whole_bits, [23] * LANES))
            p = builder.fmul(p, builder.bitcast(power, FLOATS.type))
            FLOATS.store(builder, p, at)
            builder.store(builder.fadd(builder.load(total), p), total)
        return _folded(builder, builder.load(total), builder.fadd)

    return types.float32(place, place, types.float32), generate


def _widening(bits: int) -> Any:
    @intrinsic
    def widen(typing: Any, codes: Any, scale: Any, out: Any) -> Any:
        """A block of 32 codes, times scale, as floats.

        Those of 4 bits are two in a byte: the low halves come first; they count from -8.
        """

        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            codes, scale, out = given
            if bits == 4:
                pairs = CODES.load(builder, codes)
                halves = builder.and_(pairs, CODES.all(15)), builder.lshr(pairs, CODES.all(4))
                found = [builder.sub(half, CODES.all(8)) for half in halves]
            else:
                found = [CODES.load(builder, builder.add(codes, _number(at))) for at in (0, 16)]
            for half, part in enumerate(found):
                wide = builder.fmul(builder.sitofp(part, WIDENED.type), WIDENED.spread(builder, scale))
                WIDENED.store(builder, wide, builder.add(out, _number(64 * half)))
            return context.get_dummy_value()

        return types.void(place, types.float32, place), generate

    return widen


def _pointing(element: Any, kind: Any) -> Any:
    @intrinsic
    def point(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            return builder.inttoptr(given[0], element.as_pointer())

        return types.CPointer(kind)(place), generate

    return point


_score_block, _score_row, _score_column, _score_one = (
    _scoring(tall, wide) for tall, wide in ((TALL, WIDE), (1, WIDE), (TALL, 1), (1, 1))
)
_add_four_two, _add_four_one, _add_two_four, _add_two_one, _add_one_eight, _add_one_one = (
    _adding(tall, wide) for tall, wide in ((4, 2), (4, 1), (2, 4), (2, 1), (1, 8), (1, 1))
)
_widen_four, _widen_eight = _widening(4), _widening(8)
_to_floats, _to_halves = _pointing(FLOAT, types.float32), _pointing(ir.IntType(16), types.uint16)


@part(ARITHMETIC)
def _floats(address: Any, count: Any) -> Any:
    return carray(_to_floats(address), (count,))


@part(ARITHMETIC)
def _halves(address: Any, count: Any) -> Any:
    return carray(_to_halves(address), (count,))


# What is read.


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
    """exp of x <= 0; what is below ``SMALLEST`` counts as that. Within 2 units in the last place."""
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
    """A function of its own: what is ``ARITHMETIC`` would take the rounding out."""
    return _exponentials_of(scores, count, top)


@part(EXACT)
def _read_row(kind: Any, row: Any, scales: Any, count: Any, width: Any, factor: Any, out: Any) -> None:
    """``count`` values of a row, times ``factor``, and zeros up to ``width``; factors of codes are 1."""
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
                _widen_eight(row + b * 32, _from_half(each[b]), out + b * 128)
        else:
            for b in range(each.size):
                _widen_four(row + b * 16, _from_half(each[b]), out + b * 128)
    for d in range(count, width):
        into[d] = ZERO


@part(ARITHMETIC)
def _read_rows(
    stored: Any, head: Any, dim: Any, width: Any, index: Any, gathered: Any, first: Any, count: Any, out: Any
) -> None:
    """One head of ``count`` rows as floats, from number ``first`` of the segment's buffer or index on."""
    kind, address, cell_step, head_step, scales, scale_step, scale_head_step = stored
    for c in range(count):
        cell = np.int64(index[first + c]) if gathered else first + c
        row = address + cell * cell_step + head * head_step
        of = scales + cell * scale_step + head * scale_head_step
        _read_row(kind, row, of, dim, width, ONE, out + c * width * 4)


# Attention.


@part(ARITHMETIC)
def _score_all(
    query: Any, rows: Any, key: Any, key_step: Any, count: Any, width: Any, weights: Any
) -> None:
    """Scores of ``rows`` queries and ``count`` keys; those up to a whole vector are -inf."""
    step, each, padded = width * 4, CHUNK * 4, -(-count // LANES) * LANES
    row = 0
    while row + TALL <= rows:
        q, w, c = query + row * step, weights + row * each, 0
        while c + WIDE <= count:
            _score_block(q, step, key + c * key_step, key_step, width, w + c * 4, each)
            c += WIDE
        while c < count:
            _score_column(q, step, key + c * key_step, key_step, width, w + c * 4, each)
            c += 1
        row += TALL
    while row < rows:
        q, w, c = query + row * step, weights + row * each, 0
        while c + WIDE <= count:
            _score_row(q, step, key + c * key_step, key_step, width, w + c * 4, each)
            c += WIDE
        while c < count:
            _score_one(q, step, key + c * key_step, key_step, width, w + c * 4, each)
            c += 1
        row += 1
    for r in range(rows):
        scores = _floats(weights + r * each, padded)
        for c in range(count, padded):
            scores[c] = NOTHING


@part(ARITHMETIC)
def _soften(scores: Any, count: Any, out: Any, width: Any, stats: Any) -> None:
    """Scores become weights exp(score - highest so far); ``stats`` are that highest, and their sum."""
    vectors = -(-count // LANES)
    known, into = _floats(stats, 2), _floats(out, width)
    before = known[0]
    top = _highest(scores, vectors, before)
    if top == NOTHING:
        top = ZERO  # weights of next to nothing, not exp(-inf + inf)
    elif top > before:
        shrink = _exp(before - top)
        known[0] = top
        known[1] *= shrink
        for d in range(width):
            into[d] *= shrink
    known[1] += _exponentials(scores, vectors, top)


@part(ARITHMETIC)
def _add_all(
    weights: Any, rows: Any, count: Any, value: Any, value_step: Any, width: Any, out: Any
) -> None:
    """``out[i] += weights[i] @ values`` for ``rows`` rows and ``count`` values."""
    step, each, unit = width * 4, CHUNK * 4, LANES * 4
    row = 0
    while row < rows:
        tall = 4 if row + 4 <= rows else 2 if row + 2 <= rows else 1
        w, o, at = weights + row * each, out + row * step, 0
        if tall == 4:
            while at + 2 * unit <= step:
                _add_four_two(w, each, count, value + at, value_step, o + at, step)
                at += 2 * unit
            while at < step:
                _add_four_one(w, each, count, value + at, value_step, o + at, step)
                at += unit
        elif tall == 2:
            while at + 4 * unit <= step:
                _add_two_four(w, each, count, value + at, value_step, o + at, step)
                at += 4 * unit
            while at < step:
                _add_two_one(w, each, count, value + at, value_step, o + at, step)
                at += unit
        else:
            while at + 8 * unit <= step:
                _add_one_eight(w, each, count, value + at, value_step, o + at, step)
                at += 8 * unit
            while at < step:
                _add_one_one(w, each, count, value + at, value_step, o + at, step)
                at += unit
        row += tall


@part(ARITHMETIC)
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


STORED = types.UniTuple(types.int64, 7)


def scratch_size(rows: int, head_dim: int, v_dim: int) -> int:
    """Floats that ``attend`` writes over, for as many query rows of a task."""
    k_width, v_width = (-(-dim // LANES) * LANES for dim in (head_dim, v_dim))
    return rows * (k_width + v_width + CHUNK + 2) + CHUNK * (k_width + v_width) + 16


@kernel(
    types.UniTuple(types.int64, 4), types.float32, STORED, STORED, types.UniTuple(types.int64, 4),
    *[TABLE] * 3, *[LISTED] * 2, types.int64, ROWS, ROWS,
    types.Array(types.float32, 1, "C"), types.Array(types.int64, 2, "C"), types.int64, types.int64,
    fastmath=ARITHMETIC,
)  # fmt: skip
def attend(
    query: Any, scale: Any, key: Any, value: Any, sizes: Any, tasks: Any, segments: Any, readers: Any,
    slots: Any, index: Any, piece: Any, parts: Any, totals: Any, scratch: Any, marks: Any, unit: Any,
    stop: Any,
) -> None:  # fmt: skip
    """Units ``[unit, stop)`` of work: unit ``i * kv_heads + h`` is KV head h of task i.

    query: its kind, address, and steps of a token and of a head; multiplied by ``scale``. key and value: kind,
    address, steps of a row and of a head; for codes the same three of their scales (F16), else zeros. sizes:
    kv_heads, query heads of each, head_dim, v_dim. segments, readers and index are the plan's; tasks, slots
    and ``piece``, the rows of a chunk, are as ``ragged_kernel.Launch`` says. Into ``parts`` (all slots, heads,
    v_dim) goes what the values of a slot add up to, and into ``totals`` (all slots, heads, 2) the highest
    score and the sum of the weights.

    What is written over: marks (most readers of a task, 3), and scratch, as many floats as ``scratch_size``.
    """
    kv_heads, group, head_dim, v_dim = sizes
    k_width, v_width = -(-head_dim // LANES) * LANES, -(-v_dim // LANES) * LANES
    keys = (scratch.ctypes.data + 63) // 64 * 64
    values = keys + CHUNK * k_width * 4
    rest = values + CHUNK * v_width * 4
    q_kind, q_address, q_step, q_head_step = query
    while unit < stop:
        segment, first, last, number = tasks[unit // kv_heads]
        kv_head, gathered, start = unit % kv_heads, segments[segment, 0], np.int64(segments[segment, 1])
        head, count, used = kv_head * group, np.int64(last - first), marks[: last - first]
        weights = rest
        queries = weights + count * group * CHUNK * 4
        sums = queries + count * group * k_width * 4
        stats = sums + count * group * v_width * 4
        low, high = _mark(readers, first, slots, np.int64(number), piece, used)
        for i in range(count):
            row = q_address + readers[first + i, 0] * q_step + head * q_head_step
            for g in range(group):
                into = queries + (i * group + g) * k_width * 4
                _read_row(q_kind, row + g * q_head_step, 0, head_dim, k_width, scale, into)
        _floats(sums, count * group * v_width)[:] = ZERO
        known = _floats(stats, count * group * 2)
        for r in range(count * group):
            known[2 * r], known[2 * r + 1] = NOTHING, ZERO
        k_there = not gathered and key[0] == F32 and head_dim == k_width
        v_there = not gathered and value[0] == F32 and v_dim == v_width
        for at in range(low, high, CHUNK):
            size = min(CHUNK, high - at)
            if k_there:
                k, k_step = key[1] + (start + at) * key[2] + kv_head * key[3], key[2]
            else:
                k, k_step = keys, k_width * 4
                _read_rows(key, kv_head, head_dim, k_width, index, gathered, start + at, size, k)
            if v_there:
                v, v_step = value[1] + (start + at) * value[2] + kv_head * value[3], value[2]
            else:
                v, v_step = values, v_width * 4
                _read_rows(value, kv_head, v_dim, v_width, index, gathered, start + at, size, v)
            i = 0
            while i < count:  # as many readers together as see the same
                begin, end = max(used[i, 0] - at, 0), min(used[i, 1] - at, size)
                j = i + 1
                while j < count and begin == max(used[j, 0] - at, 0) and end == min(used[j, 1] - at, size):
                    j += 1
                if begin < end:
                    row, rows, shown = i * group, (j - i) * group, end - begin
                    w, o = weights + row * CHUNK * 4, sums + row * v_width * 4
                    q = queries + row * k_width * 4
                    _score_all(q, rows, k + begin * k_step, k_step, shown, k_width, w)
                    for r in range(rows):
                        _soften(w + r * CHUNK * 4, shown, o + r * v_width * 4, v_width, stats + (row + r) * 8)
                    _add_all(w, rows, shown, v + begin * v_step, v_step, v_width, o)
                i = j
        for i in range(count):
            if used[i, 0] < used[i, 1]:
                for g in range(group):
                    row, slot = i * group + g, used[i, 2]
                    parts[slot, head + g, :] = _floats(sums + row * v_width * 4, v_dim)
                    totals[slot, head + g, 0], totals[slot, head + g, 1] = known[2 * row], known[2 * row + 1]
        unit += 1


@kernel(ROWS, ROWS, LISTED, SINKS, place, fastmath=ARITHMETIC)
def merge(parts: Any, totals: Any, edges: Any, sinks: Any, out: Any) -> None:
    """``out``, the address of (tokens, heads, v_dim): of query q the slots ``[edges[q], edges[q + 1])`` in one.

    Sinks (heads,) take part in the softmax; none: an empty array.
    """
    _, heads, v_dim = parts.shape
    for token in range(edges.size - 1):
        for head in range(heads):
            top, total = NOTHING, ZERO
            for slot in range(edges[token], edges[token + 1]):
                top = max(top, totals[slot, head, 0])
            if sinks.size and sinks[head] > NOTHING:
                top = max(top, sinks[head])
                total = _exp(sinks[head] - top)
            into = _floats(out + (token * heads + head) * v_dim * 4, v_dim)
            into[:] = ZERO
            for slot in range(edges[token], edges[token + 1]):
                if totals[slot, head, 0] > NOTHING or totals[slot, head, 1] != ZERO:
                    weight = _exp(totals[slot, head, 0] - top)
                    total += weight * totals[slot, head, 1]
                    found = parts[slot, head]
                    for d in range(v_dim):
                        into[d] += weight * found[d]
            for d in range(v_dim):
                into[d] /= total
