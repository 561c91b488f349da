"""A group of one rank, as a backend that can join processes offers it without a launcher."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

import ml
from ml.capabilities import Group, SupportsDistributed
from ml.dtypes import DType
from ml.protocols import Backend, Context
from ml.testing.harness import BackendCase, assert_same, each, refused
from ml.testing.samples import DTYPES

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MLX_RANK", "MLX_HOSTFILE")
SUMMED = (DType.F32, DType.F16, DType.BF16, DType.I32, DType.I64)


class GroupTests(BackendCase):
    @pytest.fixture
    def group(self, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
        """A group of one rank, whatever launcher the tests run under."""
        if not isinstance(backend, SupportsDistributed):
            pytest.skip("no SupportsDistributed: a model runs in one process")
        for name in LAUNCHER_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        group = backend.distributed(timeout=5.0)
        yield group
        group.close()

    def test_a_process_that_no_launcher_started_is_a_group_of_one(self, group: Group) -> None:
        assert (group.rank, group.size, group.timeout) == (0, 1, 5.0)
        group.abandon("forward", ValueError("no other rank waits for it"))
        group.barrier()

    @each(dtype=DTYPES)
    def test_what_one_rank_gathers_is_its_own_and_new_storage(
        self, group: Group, ctx: Context, dtype: DType
    ) -> None:
        array = np.random.default_rng(3).integers(0, 2, (3, 4)).astype(dtype.numpy)
        tensor = ctx.from_numpy(array, dtype)
        for axis in (0, 1, -1):
            for view, expected in ((tensor, array), (tensor.permute(ctx, 1, 0), array.T)):
                whole = group.all_gather(ctx, view, axis)
                assert_same(whole, expected, dtype)
                ctx.zeros(whole.shape, dtype).copy(ctx, whole)
        assert_same(tensor, array, dtype)

    @each(dtype=SUMMED)
    def test_the_sum_of_one_rank_is_its_own_and_new_storage(
        self, group: Group, ctx: Context, dtype: DType
    ) -> None:
        array = np.arange(-6, 6).reshape(3, 4).astype(dtype.numpy)
        tensor = ctx.from_numpy(array, dtype)
        for view, expected in (
            (tensor, array),
            (tensor.slice(ctx, 1, 1, 4, 2), array[:, 1:4:2]),
            (tensor.slice(ctx, 0, 1, 1), array[1:1]),
        ):
            total = group.all_reduce(ctx, view)
            assert_same(total, expected, dtype)
            ctx.zeros(total.shape, dtype).copy(ctx, total)
        assert_same(tensor, array, dtype)

    def test_a_group_refuses_what_it_cannot_add_up_or_gather(
        self, group: Group, ctx: Context, foreign: Context, backend: Backend
    ) -> None:
        kept = ctx.from_numpy([1, 0], DType.BOOL)
        other = foreign.from_numpy([1.0])
        refused(lambda: group.all_reduce(ctx, kept), error=ml.DTypeError, keep=[kept])
        refused(
            lambda: group.all_gather(ctx, ctx.zeros((), DType.F32)),
            lambda: group.all_gather(ctx, kept, 1),
            lambda: group.all_gather(ctx, kept, -2),
            error=ml.ShapeError,
            keep=[kept],
        )
        refused(lambda: group.all_reduce(ctx, other), lambda: group.all_gather(ctx, other))

    def test_a_backend_has_one_group_at_a_time_and_a_limit_in_seconds(
        self, group: Group, backend: Backend
    ) -> None:
        assert isinstance(backend, SupportsDistributed)
        join = backend.distributed
        refused(join, error=ml.GroupError)
        group.close()
        refused(lambda: join(0.0), lambda: join(math.nan), lambda: join(-1.0), error=ml.ShapeError)
        join().barrier()

    def test_a_group_is_closed_by_itself_or_with_its_backend(
        self, group: Group, ctx: Context, backend: Backend
    ) -> None:
        x = ctx.from_numpy([1.0])
        group.close()
        group.close()
        refused(
            lambda: group.all_reduce(ctx, x),
            lambda: group.all_gather(ctx, x),
            group.barrier,
            error=ml.ClosedError,
        )
        assert isinstance(backend, SupportsDistributed)
        later = backend.distributed()
        backend.close()
        refused(later.barrier, backend.distributed, error=ml.ClosedError)
