"""Program order across views, contexts, forward, compute and reserve."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ml.dtypes import DType
from ml.protocols import Backend, Context, Tensor
from ml.testing.harness import BackendCase, assert_same, each, needs


def _numbers(backend: Backend) -> Tensor:
    """The numbers 0 to 3; the copy may be pending."""
    with backend.new_context() as ctx:
        tensor = ctx.zeros((4,), DType.I32)
        ctx.arange(0, 4, 1, DType.I32).copy(ctx, tensor)
        return tensor


def _doubled(backend: Backend, tensor: Tensor) -> list[int]:
    """Twice the content of ``tensor``, whose rows are also rewritten from a pending copy."""
    with backend.new_context() as ctx:
        both = tensor.contiguous(ctx).concat(ctx, tensor, 0)
        picked = both.rows(ctx, [0, 5, 2, 7])
        picked.copy(ctx, tensor)
        ctx.compute(tensor)
        return [2 * int(number) for number in tensor.to_numpy()]


class OrderTests(BackendCase):
    def test_a_write_is_seen_by_a_view_handed_out_before_it(self, ctx: Context) -> None:
        tensor = ctx.zeros((4,), DType.F32)
        view = tensor.slice(ctx, 0, 1, 3)
        assert_same(view, [0, 0], DType.F32)
        ctx.full((4,), 3, DType.F32).copy(ctx, tensor)
        assert_same(view, [3, 3], DType.F32)

    def test_a_native_taken_before_a_write_does_not_freeze_the_tensor(self, ctx: Context) -> None:
        tensor = ctx.zeros((4,), DType.F32)
        natives = [tensor.native, tensor.slice(ctx, 0, 0, 2).native]
        ctx.full((4,), 3, DType.F32).copy(ctx, tensor)
        assert_same(tensor, [3, 3, 3, 3], DType.F32)
        assert len(natives) == 2

    @needs("add")
    def test_a_read_before_a_write_keeps_what_it_read(self, ctx: Context) -> None:
        tensor = ctx.full((3,), 1, DType.F32)
        other = ctx.full((3,), 10, DType.F32)
        before = tensor.add(ctx, other)
        copied, cast = tensor.contiguous(ctx), tensor.cast(ctx, DType.I32)
        other.copy(ctx, tensor)
        after = tensor.add(ctx, other)
        ctx.forward(after, before).compute()
        assert_same(before, [11] * 3, DType.F32)
        assert_same(copied, [1] * 3, DType.F32)
        assert_same(cast, [1] * 3, DType.I32)
        assert_same(after, [20] * 3, DType.F32)

    @needs("add")
    def test_writes_and_reads_that_feed_each_other(self, ctx: Context) -> None:
        """Fibonacci in place: each step reads what the previous two wrote through other views."""
        tensor = ctx.zeros((30,), DType.I64)
        ctx.full((1,), 1, DType.I64).copy(ctx, tensor.slice(ctx, 0, 1, 2))
        for i in range(2, 30):
            a, b = tensor.slice(ctx, 0, i - 2, i - 1), tensor.view(ctx, i - 1, (1,))
            a.add(ctx, b).copy(ctx, tensor.slice(ctx, 0, i, i + 1))
        expected = [0, 1]
        while len(expected) < 30:
            expected.append(expected[-1] + expected[-2])
        assert_same(tensor, expected, DType.I64)

    def test_set_rows_takes_indices_as_they_are_now(self, ctx: Context) -> None:
        tensor = ctx.zeros((4, 1), DType.F32)
        rows = ctx.from_numpy(np.array([1, 3], np.int32))
        tensor.set_rows(ctx, ctx.full((2, 1), 5, DType.F32), rows)
        picked = tensor.rows(ctx, rows)
        ctx.zeros((2,), DType.I32).copy(ctx, rows)
        assert_same(tensor, [[0], [5], [0], [5]], DType.F32)
        assert_same(picked, [[5], [5]], DType.F32)

    def test_host_data_may_change_as_soon_as_the_call_returns(self, ctx: Context) -> None:
        host, rows = np.ones((2, 2), np.float32), np.array([0, 1])
        tensor, target = ctx.from_numpy(host), ctx.zeros((2, 2), DType.F32)
        target.set_rows(ctx, tensor, rows)
        picked = target.rows(ctx, rows)
        host[:], rows[:] = 7, 0
        assert_same(tensor, np.ones((2, 2)), DType.F32)
        assert_same(target, np.ones((2, 2)), DType.F32)
        assert_same(picked, np.ones((2, 2)), DType.F32)

    def test_forward_returns_the_context_and_compute_takes_tensors(self, ctx: Context) -> None:
        a, b = ctx.full((2,), 1, DType.F32), ctx.full((2,), 2, DType.F32)
        assert ctx.forward(a) is ctx
        assert ctx.forward(a, b).forward() is ctx
        ctx.compute(a, b)
        ctx.compute()
        assert_same(a, [1, 1], DType.F32)
        assert_same(b, [2, 2], DType.F32)

    @each(compute_after=[False, True])
    def test_reserve_writes_nothing_and_forgets_nothing(self, ctx: Context, compute_after: bool) -> None:
        tensor = ctx.from_numpy(np.arange(4, dtype=np.float32))
        view = tensor.slice(ctx, 0, 2, 4)
        result = tensor.cast(ctx, DType.I32)
        ctx.forward(tensor, result)
        ctx.reserve()
        assert_same(tensor, [0, 1, 2, 3], DType.F32)
        if compute_after:
            ctx.compute(result)
        ctx.full((2,), 9, DType.F32).copy(ctx, view)
        ctx.forward(view).reserve()
        assert_same(result, [0, 1, 2, 3], DType.I32)
        assert_same(tensor, [0, 1, 9, 9], DType.F32)

    def test_more_operations_than_max_graph_nodes_still_run(self, backend: Backend) -> None:
        with backend.new_context(max_graph_nodes=4) as ctx:
            tensor = ctx.zeros((8,), DType.I32)
            for i in range(8):
                ctx.full((1,), i, DType.I32).copy(ctx, tensor.slice(ctx, 0, i, i + 1))
            ctx.forward(tensor).compute()
            assert_same(tensor, np.arange(8), DType.I32)

    def test_a_backend_opened_in_one_thread_is_used_in_others(
        self, open_backend: Callable[[], Backend]
    ) -> None:
        """A server opens a backend in one thread and computes in another; frameworks keep state per
        thread.
        """
        with ThreadPoolExecutor(1) as opener, ThreadPoolExecutor(1) as worker:
            backend = opener.submit(open_backend).result()
            made = opener.submit(_numbers, backend).result()
            theirs = worker.submit(_numbers, backend).result()
            for thread in (worker, opener):
                assert thread.submit(_doubled, backend, made).result() == [0, 2, 4, 6]
                assert thread.submit(_doubled, backend, theirs).result() == [0, 2, 4, 6]
            assert _doubled(backend, theirs) == _doubled(backend, _numbers(backend)) == [0, 2, 4, 6]
            worker.submit(backend.close).result()

    def test_tensors_outlive_their_context(self, backend: Backend) -> None:
        with backend.new_context() as first:
            tensor = first.arange(0, 6, 1, DType.F32)
            view = tensor.reshape(first, 2, 3).permute(first, 1, 0)
        assert_same(view, [[0, 3], [1, 4], [2, 5]], DType.F32)
        with backend.new_context() as second:
            second.full((3, 1), 8, DType.F32).copy(second, view.slice(second, 1, 0, 1))
            assert_same(tensor, [8, 8, 8, 3, 4, 5], DType.F32)

    def test_a_closed_context_does_not_close_the_others(self, backend: Backend) -> None:
        first, second = backend.new_context(), backend.new_context()
        first.close()
        assert_same(second.zeros((2,), DType.F32), [0, 0], DType.F32)
        second.close()
