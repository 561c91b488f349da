"""Products, maxima and exponentials of vectors in host memory, written in LLVM IR for numba's kernels. All
take addresses, steps in bytes, and counts. numba does not detect changes of this module: remove
``__pycache__`` after a change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16 if binding.get_host_cpu_features().get("avx512f") else 8
"""Floats per vector. Processors with shorter vectors split it."""
TALL = 4 if LANES == 16 else 2
"""Queries whose products with ``WIDE`` keys are summed in registers."""
WIDE = 4
SMALLEST = np.float32(-87.0)
LOG2_E = np.float32(1.4426950408889634)
ROUNDING = np.float32(12582912.0)
"""1.5 * 2^23: a number added to it is rounded to an integer, found in the low bits."""
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
POLYNOMIAL = tuple(map(np.float32, (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1,
)))  # fmt: skip
"""Approximates (exp(x) - 1 - x) / x^2 for |x| up to half of log 2."""
EXPONENT = 127 - 0x4B400000
ONE = np.float32(1)
BYTE, INT32, INT64, FLOAT = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
place = types.int64
"""An address, a step in bytes, or a count."""


class _Vectors:
    """Loads and stores of vectors in memory that is aligned only to elements."""

    def __init__(self, element: Any, count: int, align: int) -> None:
        self.type, self.count, self.align = ir.VectorType(element, count), count, align
        self.undefined = ir.Constant(self.type, ir.Undefined)

    def load(self, builder: Any, address: Any) -> Any:
        return builder.load(builder.inttoptr(address, self.type.as_pointer()), align=self.align)

    def load_first(self, builder: Any, address: Any, count: Any) -> Any:
        """The first ``count`` elements, then zeros; no memory behind them is read."""
        place = builder.inttoptr(address, self.type.as_pointer())
        lanes = ir.Constant(ir.VectorType(INT64, self.count), list(range(self.count)))
        shown = builder.icmp_signed("<", lanes, _Vectors(INT64, self.count, 8).spread(builder, count))
        kind = ir.FunctionType(self.type, [place.type, INT32, shown.type, self.type])
        load = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.load.v{self.count}f32.p0")
        return builder.call(load, [place, ir.Constant(INT32, self.align), shown, self.all(0)])

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
    """total + one * other, rounded once if the processor supports it."""
    return builder.fadd(total, builder.fmul(one, other, flags=["contract"]), flags=["contract"])


def _stepping(builder: Any, address: Any, step: Any, count: int) -> list[Any]:
    """``count`` addresses, ``step`` apart."""
    return [builder.add(address, builder.mul(step, _number(i))) for i in range(count)]


def _kept(builder: Any, count: int) -> list[Any]:
    """Zero vectors as accumulators of a loop; LLVM keeps them in registers."""
    found = [cgutils.alloca_once(builder, FLOATS.type) for _ in range(count)]
    for one in found:
        builder.store(FLOATS.all(0), one)
    return found


def _halved(builder: Any, vector: Any) -> Any:
    """For 16 lanes, the sums of lanes 8 apart; 8 lanes are unchanged."""
    if vector.type.count == 8:
        return vector
    low, high = (_shuffled(builder, vector, vector, range(at, at + 8)) for at in (0, 8))
    return builder.fadd(low, high)


def _sums(builder: Any, vectors: Sequence[Any]) -> Any:
    """A vector of four sums, each over the lanes of one of four vectors."""

    def paired(one: Any, other: Any) -> Any:  # like the processor's horizontal sum
        even = _shuffled(builder, one, other, [0, 2, 8, 10, 4, 6, 12, 14])
        return builder.fadd(even, _shuffled(builder, one, other, [1, 3, 9, 11, 5, 7, 13, 15]))

    first, second, third, fourth = (_halved(builder, vector) for vector in vectors)
    both = paired(paired(first, second), paired(third, fourth))
    low, high = (_shuffled(builder, both, both, range(at, at + 4)) for at in (0, 4))
    return builder.fadd(low, high)


def _folded(builder: Any, vector: Any, fold: Callable[[Any, Any], Any]) -> Any:
    """Reduce all lanes to one number."""
    while (half := vector.type.count // 2) > 0:
        low, high = (_shuffled(builder, vector, vector, range(at, at + half)) for at in (0, half))
        vector = fold(low, high)
    return builder.extract_element(vector, ir.Constant(INT32, 0))


def _scoring(tall: int, wide: int) -> Any:
    @intrinsic
    def score(
        typing: Any, query: Any, query_step: Any, key: Any, key_step: Any, dim: Any, out: Any, out_step: Any
    ) -> Any:
        """``out[i, j] = query[i] @ key[j]``, for ``tall`` queries and ``wide`` keys of ``dim`` floats; the
        queries end with zeros up to a whole vector.
        """

        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            query, query_step, key, key_step, dim, out, out_step = given
            queries = _stepping(builder, query, query_step, tall)
            keys = _stepping(builder, key, key_step, wide)
            sums = _kept(builder, tall * wide)

            def add(at: Any, load: Callable[[Any], Any]) -> None:
                ks = [load(builder.add(one, at)) for one in keys]
                for i in range(tall):
                    q = FLOATS.load(builder, builder.add(queries[i], at))
                    for k, total in zip(ks, sums[i * wide : (i + 1) * wide], strict=True):
                        builder.store(_added(builder, builder.load(total), q, k), total)

            whole, rest = (take(dim, _number(LANES)) for take in (builder.udiv, builder.urem))
            with cgutils.for_range(builder, whole) as loop:
                at = builder.mul(loop.index, _number(LANES * 4))
                add(at, lambda place: FLOATS.load(builder, place))
            with cgutils.if_likely(builder, builder.icmp_signed("!=", rest, _number(0))):
                at = builder.mul(whole, _number(LANES * 4))
                add(at, lambda place: FLOATS.load_first(builder, place, rest))
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
        typing: Any, weight: Any, weight_step: Any, count: Any, value: Any, value_step: Any, left: Any,
        out: Any, out_step: Any,
    ) -> Any:  # fmt: skip
        """``out[i] += weight[i] @ value``: ``tall`` rows of ``count`` weights, ``wide`` vectors of values, of
        which the last has the floats that remain of ``left``.
        """

        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            weight, weight_step, count, value, value_step, left, out, out_step = given
            last = builder.sub(left, _number(LANES * (wide - 1)))
            weights = _stepping(builder, weight, weight_step, tall)
            parts = [_number(LANES * 4 * n) for n in range(wide)]
            places = [
                builder.add(row, part) for row in _stepping(builder, out, out_step, tall) for part in parts
            ]
            sums = _kept(builder, tall * wide)
            for total, at in zip(sums, places, strict=True):
                builder.store(FLOATS.load(builder, at), total)
            with cgutils.for_range(builder, count) as loop:
                row = builder.add(value, builder.mul(loop.index, value_step))
                vs = [FLOATS.load(builder, builder.add(row, part)) for part in parts[:-1]]
                vs.append(FLOATS.load_first(builder, builder.add(row, parts[-1]), last))
                at = builder.mul(loop.index, _number(4))
                for i in range(tall):
                    share = FLOATS.spread(builder, _float(builder, builder.add(weights[i], at)))
                    for v, total in zip(vs, sums[i * wide : (i + 1) * wide], strict=True):
                        builder.store(_added(builder, builder.load(total), share, v), total)
            for total, at in zip(sums, places, strict=True):
                FLOATS.store(builder, builder.load(total), at)
            return context.get_dummy_value()

        return types.void(*[place] * 8), generate

    return add


@intrinsic
def highest(typing: Any, scores: Any, count: Any, start: Any) -> Any:
    """The maximum of ``start`` and ``count`` vectors of scores, ignoring NaN."""

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
def exponentials(typing: Any, scores: Any, count: Any, top: Any) -> Any:
    """Replace ``count`` vectors of scores by exp(score - top), as computed by ``_exp``; returns their sum."""

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
            power = builder.add(
                builder.bitcast(shifted, whole_bits), ir.Constant(whole_bits, [EXPONENT] * LANES)
            )
            power = builder.shl(power, ir.Constant(whole_bits, [23] * LANES))
            p = builder.fmul(p, builder.bitcast(power, FLOATS.type))
            FLOATS.store(builder, p, at)
            builder.store(builder.fadd(builder.load(total), p), total)
        return _folded(builder, builder.load(total), builder.fadd)

    return types.float32(place, place, types.float32), generate


def _widening(bits: int) -> Any:
    @intrinsic
    def widen(typing: Any, codes: Any, scale: Any, out: Any) -> Any:
        """Decode a block of 32 codes, times scale, to floats. A byte has two 4-bit codes, offset by 8; the
        low halves come first.
        """

        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            codes, scale, out = given
            if bits == 4:
                pairs = CODES.load(builder, codes)
                halves = builder.and_(pairs, CODES.all(15)), builder.lshr(pairs, CODES.all(4))
                found = [builder.sub(half, CODES.all(8)) for half in halves]
            else:
                found = [CODES.load(builder, builder.add(codes, _number(at))) for at in (0, 16)]
            for number, half in enumerate(found):
                wide = builder.fmul(builder.sitofp(half, WIDENED.type), WIDENED.spread(builder, scale))
                WIDENED.store(builder, wide, builder.add(out, _number(64 * number)))
            return context.get_dummy_value()

        return types.void(place, types.float32, place), generate

    return widen


@intrinsic
def copy(typing: Any, row: Any, row_step: Any, count: Any, dim: Any, out: Any, out_step: Any) -> Any:
    """Copy ``count`` rows of ``dim`` floats, and add zeros up to a whole vector."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        row, row_step, count, dim, out, out_step = given
        with cgutils.for_range(builder, count) as loop:
            source = builder.add(row, builder.mul(loop.index, row_step))
            target = builder.add(out, builder.mul(loop.index, out_step))
            with cgutils.for_range(builder, builder.udiv(out_step, _number(LANES * 4))) as part:
                at = builder.mul(part.index, _number(LANES * 4))
                left = builder.sub(dim, builder.mul(part.index, _number(LANES)))
                found = FLOATS.load_first(builder, builder.add(source, at), left)
                FLOATS.store(builder, found, builder.add(target, at))
        return context.get_dummy_value()

    return types.void(*[place] * 6), generate


@intrinsic
def fetch(typing: Any, row: Any, row_step: Any, count: Any, size: Any) -> Any:
    """Ask for ``count`` rows of ``size`` bytes, which are read soon, without waiting for them."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        row, row_step, count, size = given
        pointer = BYTE.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, INT32, INT32, INT32])
        ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        how = [ir.Constant(INT32, number) for number in (0, 2, 1)]  # to read, into the L2 cache, data
        lines = builder.udiv(builder.add(size, _number(63)), _number(64))
        with cgutils.for_range(builder, count) as loop:
            source = builder.add(row, builder.mul(loop.index, row_step))
            with cgutils.for_range(builder, lines) as line:
                at = builder.add(source, builder.mul(line.index, _number(64)))
                builder.call(ask, [builder.inttoptr(at, pointer), *how])
        return context.get_dummy_value()

    return types.void(*[place] * 4), generate


def _pointing(element: Any, kind: Any) -> Any:
    @intrinsic
    def point(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            return builder.inttoptr(given[0], element.as_pointer())

        return types.CPointer(kind)(place), generate

    return point


score_block, score_row, score_column, score_one = (
    _scoring(tall, wide) for tall, wide in ((TALL, WIDE), (1, WIDE), (TALL, 1), (1, 1))
)
add_four_two, add_four_one, add_two_four, add_two_one = (
    _adding(tall, wide) for tall, wide in ((4, 2), (4, 1), (2, 4), (2, 1))
)
add_one_eight, add_one_four, add_one_two, add_one_one = (_adding(1, wide) for wide in (8, 4, 2, 1))
widen_four, widen_eight = _widening(4), _widening(8)
to_floats, to_halves = _pointing(FLOAT, types.float32), _pointing(ir.IntType(16), types.uint16)
to_integers, to_places = _pointing(INT32, types.int32), _pointing(INT64, types.int64)
