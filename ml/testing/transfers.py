"""Pages to host memory and back, bit for bit, whether the backend copies in the background or at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import ml
from ml.dtypes import DType
from ml.protocols import Backend, Context, Tensor
from ml.testing.harness import BackendCase, assert_same, each
from ml.testing.samples import DTYPES, LAYOUTS, Place, counting, in_records
from ml.transfer import page_in, page_out, pinned_memory

MANY = 24


class PageTransferTests(BackendCase):
    """What ``ml.SupportsTransfers`` promises; without it, what ``ml.transfer`` does in its place."""

    @each(layout=LAYOUTS, dtype=DTYPES)
    def test_pages_go_out_and_come_in_bit_for_bit(
        self, backend: Backend, ctx: Context, layout: Place, dtype: DType
    ) -> None:
        values = counting((2, 3, 4), dtype, start=3)
        source, target = layout(ctx, values), layout(ctx, counting((2, 3, 4), dtype, start=40))
        model = target.base.to_numpy()
        model[target.where] = values
        (array,), out = page_out(backend, ctx, [source.tensor])
        out.wait()
        assert out.done()
        assert (array.shape, array.dtype, array.flags.c_contiguous) == ((2, 3, 4), dtype.numpy, True)
        assert array.tobytes() == values.tobytes()
        page_in(backend, ctx, [array], [target.tensor]).join()
        assert target.base.to_numpy().tobytes() == model.tobytes()  # and nothing else was written

    @each(
        make=(
            lambda values: values,
            lambda values: values[::-1],
            lambda values: np.frombuffer(values.tobytes(), values.dtype).reshape(values.shape),
            lambda values: np.asfortranarray(values),
            lambda values: np.concatenate([values, values], 1)[:, : values.shape[1]],
            lambda values: np.repeat(values, 3, axis=0)[::3],
            in_records,
        )
    )
    def test_any_array_comes_in(
        self, backend: Backend, ctx: Context, make: Callable[[np.ndarray], np.ndarray]
    ) -> None:
        array = make(counting((5, 6), DType.F32, start=1))
        tensor = ctx.zeros((6, 5), DType.F32).permute(ctx, 1, 0)
        transfer = page_in(backend, ctx, [array], [tensor])
        transfer.wait()
        transfer.join()
        np.testing.assert_array_equal(tensor.to_numpy(), array)

    def test_memory_for_pages_is_the_callers(self, backend: Backend, ctx: Context) -> None:
        first, second = pinned_memory(backend, 4096), pinned_memory(backend, 4096)
        assert first.shape == (4096,)
        assert first.dtype == np.uint8
        first[:], second[:] = 1, 2
        tensor = ctx.zeros((1024,), DType.F32)
        page_in(backend, ctx, [first.view(np.float32)], [tensor]).join()
        assert tensor.to_numpy().tobytes() == first.tobytes()
        assert pinned_memory(backend, 0).shape == (0,)

    def test_what_was_paged_out_may_be_written_over_when_it_is_done(
        self, backend: Backend, ctx: Context
    ) -> None:
        values = counting((64, 128), DType.F32)
        tensor = ctx.from_numpy(values)
        (array,), out = page_out(backend, ctx, [tensor])
        out.wait()
        ctx.zeros((64, 128), DType.F32).copy(ctx, tensor)
        assert not tensor.to_numpy().any()
        assert array.tobytes() == values.tobytes()
        array[...] = 5
        assert not tensor.to_numpy().any()

    def test_what_was_written_before_is_what_goes_out(self, backend: Backend, ctx: Context) -> None:
        tensor = ctx.zeros((64, 64), DType.F32)
        for i in range(8):
            ctx.full((64, 64), i, DType.F32).copy(ctx, tensor)
        (array,), out = page_out(backend, ctx, [tensor])
        out.join()
        ctx.full((64, 64), 99, DType.F32).copy(ctx, tensor)
        out.wait()
        assert (array == 7).all()

    def test_many_are_under_way_at_a_time(self, backend: Backend, ctx: Context) -> None:
        values = [counting((16, 32), DType.F32, start=i) for i in range(MANY)]
        tensors = [ctx.from_numpy(value) for value in values]
        cells = ctx.zeros((MANY, 16, 32), DType.F32)
        outs = [page_out(backend, ctx, tensors[i : i + 2]) for i in range(0, MANY, 2)]
        for _, out in reversed(outs):
            out.wait()
        arrays = [array for actual, _ in outs for array in actual]
        assert [array.tobytes() for array in arrays] == [value.tobytes() for value in values]
        places = [cells.slice(ctx, 0, i, i + 1).reshape(ctx, 16, 32) for i in range(MANY)]
        ins = [page_in(backend, ctx, [arrays[i]], [places[i]]) for i in range(MANY)]
        for transfer in reversed(ins):
            transfer.join()
        assert cells.to_numpy().tobytes() == np.stack(values).tobytes()
        assert all(transfer.done() for transfer in [*ins, *(out for _, out in outs)])

    def test_pages_that_follow_one_another_to_one_place_arrive_in_order(
        self, backend: Backend, ctx: Context
    ) -> None:
        place = ctx.zeros((32, 32), DType.F32)
        for i in range(6):
            page_in(backend, ctx, [np.full((32, 32), i, np.float32)], [place]).join()
            if i == 3:
                ctx.full((32, 32), 50, DType.F32).copy(ctx, place)
                assert (place.to_numpy() == 50).all()
        assert (place.to_numpy() == 5).all()

    def test_empty_tensors_and_single_numbers_are_pages_too(self, backend: Backend, ctx: Context) -> None:
        arrays, out = page_out(backend, ctx, [])
        out.wait()
        assert arrays == []
        for shape in ((0, 3), ()):
            tensor = ctx.full(shape, 3, DType.F32)
            (array,), out = page_out(backend, ctx, [tensor])
            out.wait()
            assert array.shape == shape
            target = ctx.zeros(shape, DType.F32)
            page_in(backend, ctx, [array], [target]).wait()
            assert_same(target, np.full(shape, 3, np.float32))
        page_in(backend, ctx, [], []).join()

    @each(
        wrong=(
            lambda ctx: (np.zeros((3, 4), np.float32), ctx.zeros((4, 3), DType.F32)),
            lambda ctx: (np.zeros((3, 4), np.float16), ctx.zeros((3, 4), DType.F32)),
        )
    )
    def test_what_does_not_fit_is_refused_before_anything_is_written(
        self, backend: Backend, ctx: Context, wrong: Callable[[Context], tuple[np.ndarray, Tensor]]
    ) -> None:
        tensor = ctx.full((4,), 7, DType.F32)
        array, other = wrong(ctx)
        with pytest.raises((ml.ShapeError, ml.DTypeError)):
            page_in(backend, ctx, [np.ones(4, np.float32), array], [tensor, other])
        assert (tensor.to_numpy() == 7).all()

    def test_an_error_in_the_middle_leaves_what_was_not_reached(self, backend: Backend, ctx: Context) -> None:
        first, last = ctx.full((4,), 7, DType.F32), ctx.full((4,), 7, DType.F32)
        shared = ctx.full((1, 4), 7, DType.F32).view(ctx, 0, (3, 4), (0, 1))  # read-only: elements overlap
        arrays = [np.ones(4, np.float32), np.ones((3, 4), np.float32), np.ones(4, np.float32)]
        with pytest.raises(ml.ReadOnlyError):
            page_in(backend, ctx, arrays, [first, shared, last])
        assert set(first.to_numpy().tolist()) in ({1.0}, {7.0})
        assert (shared.to_numpy() == 7).all()
        assert (last.to_numpy() == 7).all()
        page_in(backend, ctx, arrays[:1], [last]).join()
        assert (last.to_numpy() == 1).all()

    def test_a_closed_context_is_refused(self, backend: Backend, ctx: Context) -> None:
        tensor = ctx.zeros((4,), DType.F32)
        closed = backend.new_context()
        closed.close()
        with pytest.raises(ml.ClosedError):
            page_in(backend, closed, [np.ones(4, np.float32)], [tensor])
        assert not tensor.to_numpy().any()

    def test_close_waits_for_what_is_under_way(self, open_backend: Callable[[], Backend]) -> None:
        values = counting((256, 1024), DType.F32)
        with open_backend() as backend:
            ctx = backend.new_context()
            (array,), out = page_out(backend, ctx, [ctx.from_numpy(values)])
            transfer = page_in(backend, ctx, [values], [ctx.zeros(values.shape, DType.F32)])
        assert out.done()
        assert transfer.done()
        assert array.tobytes() == values.tobytes()
