"""Backends that attend to quantized codes or write them, against the formats' definition in float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ml.capabilities import KVStore, SupportsKVStorage, SupportsRaggedAttention
from ml.dtypes import DType
from ml.errors import DeviceError
from ml.protocols import Backend, Context, Tensor
from ml.ragged import RaggedPlan
from ml.testing.harness import BackendCase, each, needs
from ml.testing.ragged import ragged_reference, random_plan
from ml.testing.samples import FLOATS, exact, normal

Arrays = tuple[np.ndarray, np.ndarray]
BLOCK = 32
FORMATS = ("Q8_0", "Q4_0")
ORDERS = {"head major": (1, 0, 2), "token major": (0, 1, 2)}
_stores_codes = needs(DType.I8, DType.U8, DType.F16)
TOLERANCE = {DType.F32: 2e-5, DType.F16: 4e-3, DType.BF16: 3e-2}


def encoded(x: np.ndarray, name: str) -> Arrays:
    """Codes and F16 scales of F32 (..., dim), as in ggml-quants.c: each product is rounded to F32."""
    blocks = x.astype(np.float32).reshape(-1, BLOCK)
    peak = blocks[np.arange(len(blocks)), np.abs(blocks).argmax(1)][:, None] + np.float32(0)  # no -0.0
    scale = abs(peak) / np.float32(127) if name == "Q8_0" else peak / np.float32(-8)
    inverse = np.where(scale == 0, np.float32(0), np.float32(1) / np.where(scale == 0, np.float32(1), scale))
    scaled = blocks * inverse
    if name == "Q8_0":
        codes = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)
    else:
        whole = np.minimum(np.trunc(scaled + np.float32(8.5)), 15).astype(np.uint8)
        codes = whole[:, : BLOCK // 2] | (whole[:, BLOCK // 2 :] << 4)
    return codes.reshape(*x.shape[:-1], -1), scale.astype(np.float16).reshape(*x.shape[:-1], -1)


def decoded(parts: Arrays, name: str) -> np.ndarray:
    """The values (..., dim) in float64."""
    codes, scales = parts
    blocks = codes.reshape(*scales.shape, -1).astype(np.int64)
    if name == "Q4_0":
        blocks = np.concatenate((blocks % 16, blocks // 16), -1) - 8
    values: np.ndarray = blocks * exact(scales)[..., None]
    return values.reshape(*scales.shape[:-1], -1)


def laid_out(ctx: Context, parts: Arrays, order: tuple[int, ...], room: int = 3) -> list[Tensor]:
    """Each part (cells, kv_heads, width), stored in this order of axes in a buffer with ``room`` more
    cells.
    """
    made = []
    for part in parts:
        whole = np.full([part.shape[axis] + (0, room, 0)[i] for i, axis in enumerate(order)], 77, part.dtype)
        host = part.transpose(order)
        whole[tuple(slice(size) for size in host.shape)] = host
        tensor = ctx.from_numpy(whole)
        for axis, size in enumerate(host.shape):
            tensor = tensor.slice(ctx, axis, 0, size)
        made.append(tensor.permute(ctx, *np.argsort(order).tolist()))
    return made


class QuantizedTests(BackendCase):
    """What SupportsRaggedAttention and SupportsKVStorage promise for storage formats."""

    @_stores_codes
    @each(
        formats=[("Q8_0", "Q8_0"), ("Q4_0", "Q4_0"), ("Q8_0", "Q4_0"), ("Q4_0", "Q8_0")],
        order=ORDERS,
        heads=[(1, 1), (4, 2), (6, 1), (8, 1)],
        case=["1 of 9 cells", "3 of 40 cells", "70 of 130 cells", "2 of 600 cells"],
    )
    def test_each_query_attends_to_the_codes_that_its_plan_names(
        self, backend: Backend, ctx: Context, formats: tuple[str, str], order: tuple[int, ...],
        heads: tuple[int, int], case: str,
    ) -> None:  # fmt: skip
        """Scales in no segment are NaN; with sinks if a KV head has several query heads."""
        tokens, cells = (int(word) for word in case.split() if word.isdigit())
        plan = random_plan(tokens + heads[0], tokens, cells)
        query = normal((tokens, heads[0], 64), DType.F32, 50, spread=1)
        key, value = (
            encoded(normal((cells + 3, heads[1], dim), DType.F32, 51 + dim, spread=1), name)
            for dim, name in zip((64, 96), formats, strict=True)
        )
        named = np.concatenate([plan.rows(number) for number in range(len(plan.segments))])
        for _, scales in (key, value):
            scales[np.setdiff1d(np.arange(cells + 3), named)] = np.nan
        sinks = normal((heads[0],), DType.F32, 52, spread=1) if heads[0] != heads[1] else None
        self._check(backend, ctx, query, key, value, formats, order, plan, sinks)

    @_stores_codes
    @each(dtype=FLOATS, name=FORMATS)
    def test_queries_may_have_any_float_dtype_over_codes(
        self, backend: Backend, ctx: Context, dtype: DType, name: str
    ) -> None:
        query = normal((5, 4, 64), dtype, 53, spread=1)
        key, value = (encoded(normal((80, 2, 64), DType.F32, seed, spread=1), name) for seed in (54, 55))
        sinks = normal((4,), dtype, 56, spread=1)
        plan = random_plan(9, 5, 80)
        self._check(backend, ctx, query, key, value, (name, name), (1, 0, 2), plan, sinks)

    @_stores_codes
    @each(name=FORMATS)
    def test_codes_that_a_neighbour_sees_reach_no_other_query(
        self, backend: Backend, ctx: Context, name: str
    ) -> None:
        """Causal queries over one segment; the cell that only the last query sees contains NaN."""
        query = normal((4, 2, 32), DType.F32, 57, spread=1)
        key, value = (encoded(normal((40, 1, 32), DType.F32, seed, spread=1), name) for seed in (58, 59))
        readers = np.array([(i, 0, 37 + i) for i in range(4)])
        plan = RaggedPlan(4, np.array([(0, 0, 40, 0, 4)]), readers, np.zeros(0, np.int32))
        right = ragged_reference(query, decoded(key, name), decoded(value, name), plan, 0.3)
        for part in (key, value):
            part[1][39] = np.nan
        actual = self._attend(backend, ctx, query, key, value, (name, name), (1, 0, 2), plan, None)
        out = exact(actual.to_numpy())
        np.testing.assert_allclose(out[:3], right[:3], rtol=0, atol=2e-5)
        assert np.isnan(out[3]).all()

    @_stores_codes
    @each(name=FORMATS)
    def test_codes_are_read_with_the_scales_that_are_given_with_them(
        self, backend: Backend, ctx: Context, name: str
    ) -> None:
        """The same tensor of codes is read a second time with different scales."""
        if not isinstance(backend, SupportsRaggedAttention):
            pytest.skip("no SupportsRaggedAttention: caches decode blocks first")
        query, plan = normal((1, 2, 32), DType.F32, 57, spread=1), random_plan(9, 1, 8)
        codes, scales = encoded(normal((8, 1, 32), DType.F32, 58, spread=1), name)
        same_codes = ctx.from_numpy(codes)
        for parts in ((codes, scales), (codes, scales[::-1] * np.float16(3))):
            stored = same_codes, ctx.from_numpy(parts[1])
            asked = ctx.from_numpy(query)
            actual = backend.ragged_attention(ctx, asked, stored, stored, plan, 0.3, None, (name, name))
            if actual is None:
                pytest.skip("the kernel leaves this case to decoded blocks")
            values = decoded(parts, name)
            right = ragged_reference(exact(query), values, values, plan, 0.3)
            np.testing.assert_allclose(exact(actual.to_numpy()), right, rtol=0, atol=2e-5)

    @_stores_codes
    @each(name=FORMATS)
    def test_the_kernel_reads_no_codes_of_other_backends(
        self, backend: Backend, ctx: Context, open_backend: Callable[[], Backend], name: str
    ) -> None:
        if not isinstance(backend, SupportsRaggedAttention):
            pytest.skip("no SupportsRaggedAttention: caches decode blocks first")
        other, plan = open_backend().new_context(), random_plan(9, 1, 8)
        parts = encoded(normal((8, 1, 32), DType.F32, 58, spread=1), name)
        query = ctx.zeros((1, 2, 32), DType.F32)
        own, theirs = (tuple(map(one.from_numpy, parts)) for one in (ctx, other))
        for key, value in (
            (theirs, own),
            (own, theirs),
            ((own[0], theirs[1]), own),
            (own, (theirs[0], own[1])),
        ):
            with contextlib.suppress(DeviceError):
                names = (name, name)
                assert backend.ragged_attention(ctx, query, key, value, plan, 0.3, None, names) is None

    def _check(
        self, backend: Backend, ctx: Context, query: np.ndarray, key: Arrays, value: Arrays,
        formats: tuple[str, str], order: tuple[int, ...], plan: RaggedPlan, sinks: np.ndarray | None,
    ) -> None:  # fmt: skip
        actual = self._attend(backend, ctx, query, key, value, formats, order, plan, sinks)
        dtype = DType.from_numpy(query.dtype)
        assert actual.dtype is dtype
        keys, values = (decoded(part, name) for part, name in zip((key, value), formats, strict=True))
        right = ragged_reference(exact(query), keys, values, plan, 0.3, sinks)
        np.testing.assert_allclose(exact(actual.to_numpy()), right, rtol=0, atol=TOLERANCE[dtype])

    def _attend(
        self, backend: Backend, ctx: Context, query: np.ndarray, key: Arrays, value: Arrays,
        formats: tuple[str, str], order: tuple[int, ...], plan: RaggedPlan, sinks: np.ndarray | None,
    ) -> Tensor:  # fmt: skip
        if not isinstance(backend, SupportsRaggedAttention):
            pytest.skip("no SupportsRaggedAttention: caches decode blocks first")
        keys, values = laid_out(ctx, key, order), laid_out(ctx, value, order)
        logits = None if sinks is None else ctx.from_numpy(sinks)
        asked = ctx.from_numpy(query.transpose(1, 0, 2).copy()).permute(ctx, 1, 0, 2)
        actual = backend.ragged_attention(ctx, asked, keys, values, plan, 0.3, logits, formats)
        if actual is None:
            pytest.skip("the kernel leaves this case to decoded blocks")
        return actual

    # Writing.

    @_stores_codes
    @each(
        order=ORDERS,
        formats=[("Q8_0", "Q4_0"), ("Q4_0", "Q8_0"), ("Q8_0", "Q8_0"), ("Q4_0", "Q4_0")],
        dtype=FLOATS,
        rows=[(0, 12), (5, 1)],
        case=["64 and 96, whole buffers", "64 and 64, whole buffers", "32 and 64, parts of buffers"],
    )
    def test_codes_are_written_where_they_belong_and_nowhere_else(
        self, backend: Backend, ctx: Context, order: tuple[int, ...], formats: tuple[str, str],
        dtype: DType, rows: tuple[int, int], case: str,
    ) -> None:  # fmt: skip
        start, count = rows
        first, _, second, kind, *_ = case.replace(",", "").split()
        dims = int(first), int(second)
        before, parts, store = self._store(backend, ctx, order, formats, dims, 0 if kind == "whole" else 3)
        new = [normal((count, 2, dim), dtype, 62 + i, spread=3) for i, dim in enumerate(dims)]
        new[0][0, 0, :32] = 0
        sources = [ctx.from_numpy(x.transpose(1, 0, 2).copy()).permute(ctx, 1, 0, 2) for x in new]
        assert store.write(ctx, start, count, sources[0], sources[1])
        for host, tensors, x, name in zip(before, parts, new, formats, strict=True):
            for old, tensor, written in zip(host, tensors, encoded(exact(x), name), strict=True):
                old[start : start + count] = written
                np.testing.assert_array_equal(tensor.to_numpy(), old)
        assert store.read(ctx, start, count) is None

    @_stores_codes
    @each(
        case={
            "rows beyond the end": (11, 2, (2, 2, 64), (2, 2, 96), DType.F32),
            "rows before the start": (-1, 1, (1, 2, 64), (1, 2, 96), DType.F32),
            "no row": (0, 0, (0, 2, 64), (0, 2, 96), DType.F32),
            "keys of another size": (0, 1, (1, 2, 32), (1, 2, 96), DType.F32),
            "values of another size": (0, 1, (1, 2, 64), (1, 2, 64), DType.F32),
            "more keys than rows": (0, 1, (2, 2, 64), (1, 2, 96), DType.F32),
            "fewer axes": (0, 1, (2, 64), (1, 2, 96), DType.F32),
            "integers": (0, 1, (1, 2, 64), (1, 2, 96), DType.I32),
        }
    )
    def test_what_is_not_plain_is_no_codes_and_nothing_written(
        self, backend: Backend, ctx: Context, open_backend: Callable[[], Backend],
        case: tuple[int, int, tuple[int, ...], tuple[int, ...], DType],
    ) -> None:  # fmt: skip
        start, count, key_shape, value_shape, dtype = case
        before, parts, store = self._store(backend, ctx, (1, 0, 2), ("Q8_0", "Q4_0"))
        assert not store.write(
            ctx, start, count, ctx.full(key_shape, 1, dtype), ctx.full(value_shape, 1, dtype)
        )
        mine = ctx.full((1, 2, 64), 1, DType.F32), ctx.full((1, 2, 96), 1, DType.F32)
        with open_backend() as again, again.new_context() as other:
            assert not store.write(other, 0, 1, *mine)
            assert not store.write(ctx, 0, 1, mine[0], other.full((1, 2, 96), 1, DType.F32))
        closed = backend.new_context()
        closed.close()
        assert not store.write(closed, 0, 1, *mine)
        for host, tensors in zip(before, parts, strict=True):
            for old, tensor in zip(host, tensors, strict=True):
                np.testing.assert_array_equal(tensor.to_numpy(), old)

    def _store(
        self, backend: Backend, ctx: Context, order: tuple[int, ...], formats: tuple[str, str],
        dims: tuple[int, int] = (64, 96), room: int = 0,
    ) -> tuple[list[Arrays], list[list[Tensor]], KVStore]:  # fmt: skip
        """Twelve cells of two heads of each size: their content, the tensors that hold it, and the store."""
        if not isinstance(backend, SupportsKVStorage):
            pytest.skip("no SupportsKVStorage: codes are computed first, then copied")
        before = [
            encoded(normal((12, 2, dim), DType.F32, 60 + dim), name)
            for dim, name in zip(dims, formats, strict=True)
        ]
        parts: Any = [laid_out(ctx, part, order, room) for part in before]
        store = backend.kv_store(parts[0], parts[1], formats)
        if store is None:
            pytest.skip("no store for parts like these")
        return before, parts, store
