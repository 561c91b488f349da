"""Optional capabilities other than attention: rope, host memory, a preferred layout of caches."""

from __future__ import annotations

import math

import numpy as np
import pytest

import ml
from ml.capabilities import (
    SupportsCacheConfig,
    SupportsHostMemory,
    SupportsRope,
    SupportsTransfers,
)
from ml.dtypes import DType
from ml.nn import (
    Groups,
    LinearScaling,
    Llama3Scaling,
    RopeSpec,
    YarnScaling,
    apply_rope,
    generic_grouped_matmul,
    grouped_matmul,
    rope_tables,
)
from ml.protocols import Backend, Context
from ml.testing.harness import BackendCase, assert_close, each, needs
from ml.testing.samples import DTYPES, FLOATS, exact, in_records, normal

SPECS = [
    RopeSpec(16), RopeSpec(16, base=500000.0, interleaved=True), RopeSpec(8), RopeSpec(8, interleaved=True),
    RopeSpec(16, scaling=LinearScaling(4.0)), RopeSpec(16, scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192)),
    RopeSpec(16, scaling=YarnScaling(4.0, 4096)),
]  # fmt: skip


def _any_bits(dtype: DType, shape: tuple[int, ...]) -> np.ndarray:
    """Elements of any bit pattern, including NaN and denormals."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.random.default_rng(7).integers(0, 2 if dtype is DType.BOOL else 256, nbytes, np.uint8)
    return raw.view(dtype.numpy).reshape(shape)


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


class CapabilityTests(BackendCase):
    # Rope.

    @each(dtype=FLOATS, spec=SPECS)
    def test_rope_is_the_generic_rope(
        self, backend: Backend, ctx: Context, dtype: DType, spec: RopeSpec
    ) -> None:
        if not isinstance(backend, SupportsRope):
            pytest.skip("no SupportsRope: ml.nn uses its generic implementation")
        x = ctx.from_numpy(normal((5, 3, 16), dtype, 23))
        positions = np.array([0, 1, 7, 500, 3000], np.int32)
        for layout in (x, x.permute(ctx, 1, 0, 2).contiguous(ctx).permute(ctx, 1, 0, 2)):
            fused = backend.rope(ctx, layout, ctx.from_numpy(positions), spec)
            if fused is None:
                pytest.skip("the kernel leaves this spec to the generic implementation")
            generic = apply_rope(ctx, x, *rope_tables(ctx, positions, spec), spec)
            # An angle of 3,000 has an error of 2e-4 in F32.
            slack = 100 if dtype is DType.F32 else 2
            assert_close(fused, exact(generic.to_numpy()), dtype, slack, absolute=2e-4)

    # Grouped products.

    @needs("matmul")
    @each(dtype=FLOATS, counts=[[2, 0, 3, 1], [0, 0, 0, 1], [0, 40, 0, 0], [0, 0, 0, 0], [100, 100, 0, 100]])
    def test_rows_are_multiplied_by_matrices_of_their_own(
        self, ctx: Context, dtype: DType, counts: list[int]
    ) -> None:
        """By the kernel of a backend with SupportsGroupedMatmul, and by the generic implementation."""
        groups = np.repeat(np.arange(4, dtype=np.int32), counts)
        for inner, outer in ((16, 24), (6, 7)):
            x, weight = normal((len(groups), inner), dtype, 3), normal((4, outer, inner), dtype, 4)
            turned = ctx.from_numpy(weight).permute(ctx, 0, 2, 1)
            part = turned.concat(ctx, turned, 2).slice(ctx, 2, 3, outer + 3)  # starts at any offset
            expected = np.einsum("ri,roi->ro", exact(x), exact(weight)[groups])
            for matrices, right in (
                (turned, expected),
                (turned.contiguous(ctx), expected),
                (part, np.roll(expected, -3, 1)),
            ):
                for product in (grouped_matmul, generic_grouped_matmul):
                    actual = product(ctx, ctx.from_numpy(x), matrices, Groups(ctx.from_numpy(groups)))
                    assert_close(actual, right, dtype, slack=8)

    # Arrays in host memory.

    def test_arrays_that_go_together_arrive_as_one_by_one(self, backend: Backend, ctx: Context) -> None:
        if not isinstance(backend, SupportsTransfers):
            pytest.skip("no SupportsTransfers: arrays are uploaded one at a time")
        arrays = [
            (_any_bits(dtype, shape), dtype) for dtype in DTYPES for shape in ((3, 5), (0, 2), (7,), ())
        ]
        arrays += [(np.arange(9)[::-2], DType.I32), (np.array([[0.5, -np.inf]]), DType.BF16)]
        actual = backend.upload(ctx, arrays)
        expected = [ctx.from_numpy(array, dtype).to_numpy() for array, dtype in arrays]
        for array, _ in arrays:
            array[...] = 1
        for tensor, (_, dtype), right in zip(actual, arrays, expected, strict=True):
            assert (tensor.shape, tensor.dtype) == (right.shape, dtype)
            assert tensor.to_numpy().tobytes() == right.tobytes()
        target = ctx.zeros((9, 2), DType.F32)
        for _ in range(2):
            target.set_rows(ctx, ctx.full((5, 2), 1, DType.F32), actual[-2])
        assert target.to_numpy()[:, 0].tolist() == [1, 0, 1, 0, 1, 0, 1, 0, 1]
        assert backend.upload(ctx, []) == []

    @each(dtype=DTYPES)
    def test_a_borrowed_array_reads_as_it_is(self, backend: Backend, ctx: Context, dtype: DType) -> None:
        if not isinstance(backend, SupportsHostMemory):
            pytest.skip("no SupportsHostMemory: arrays are copied")
        array = _any_bits(dtype, (2, 3, 4))
        for source in (
            array,
            array[:, ::2],
            _read_only(array),
            array[:0],
            array[::-1],
            array[:1][::-1],  # NumPy calls it C-contiguous
            in_records(array),
            in_records(array[0, 0, :1]),
        ):
            tensor = backend.borrow(ctx, source)
            assert (tensor.shape, tensor.dtype) == (source.shape, dtype)
            assert tensor.to_numpy().tobytes() == source.tobytes()
            whole = ctx.zeros(source.shape, dtype)
            tensor.copy(ctx, whole)
            assert whole.to_numpy().tobytes() == source.tobytes()

    @each(dtype=DTYPES)
    def test_what_is_written_over_a_tensor_from_outside_is_what_it_holds(
        self, backend: Backend, ctx: Context, dtype: DType
    ) -> None:
        if not isinstance(backend, SupportsHostMemory):
            pytest.skip("no SupportsHostMemory: arrays are copied")
        host = _any_bits(dtype, (2, 4, 6))
        whole = ctx.from_numpy(np.zeros((2, 4, 6), dtype.numpy))
        # Other tensors that may share the memory, pending or not: they must not change.
        result = whole.reshape(ctx, 8, 6).contiguous(ctx)
        twin = ctx.zeros((2, 4, 6), dtype)
        twin.copy(ctx, whole)
        model = np.zeros((2, 4, 6), dtype.numpy)
        for part, mine in (
            (whole.slice(ctx, 1, 1, 3), model[:, 1:3]),
            (whole.slice(ctx, 0, 1, 2), model[1:2]),
            (whole, model),
            (whole.permute(ctx, 2, 0, 1), model.transpose(2, 0, 1)),
        ):
            for values in (host.reshape(-1)[: mine.size].reshape(mine.shape), np.zeros_like(mine)):
                place = backend.overwrite(ctx, part)
                if place is None:
                    pytest.skip("this memory is not writable by the host")
                assert (place.shape, place.dtype) == (part.shape, dtype.numpy)
                place[...] = mine[...] = values
                del place
                assert whole.to_numpy().tobytes() == model.tobytes()  # and nothing else was written
        assert not result.to_numpy().astype(np.float32).any()
        assert not twin.to_numpy().astype(np.float32).any()
        ctx.from_numpy(host).copy(ctx, whole)  # later ordinary writes are visible too
        assert whole.to_numpy().tobytes() == host.tobytes()

    def test_what_shows_an_element_twice_is_not_written_over(self, backend: Backend, ctx: Context) -> None:
        if not isinstance(backend, SupportsHostMemory):
            pytest.skip("no SupportsHostMemory: arrays are copied")
        tensor = ctx.zeros((1, 4), DType.F32)
        assert backend.overwrite(ctx, tensor.view(ctx, 0, (3, 4), (0, 1))) is None
        empty = backend.overwrite(ctx, tensor.slice(ctx, 1, 2, 2))
        assert empty is None or empty.shape == (1, 0)

    # Caches.

    def test_cache_config_is_a_cache_config(self, backend: Backend) -> None:
        if not isinstance(backend, SupportsCacheConfig):
            pytest.skip("no SupportsCacheConfig: caches use the defaults")
        config = backend.cache_config()
        assert isinstance(config, ml.CacheConfig)
        assert config == backend.cache_config()
