"""Which batches are taken, which are refused, and that a refusal changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvcache
import ml
from kvcache import Batch
from kvcache.testing.harness import CacheCase, MakeRig, every_kind
from kvcache.testing.model import Setup

__all__ = ["BatchTests"]

REFUSED: dict[str, tuple[Any, Any]] = {
    "an empty batch": ([], []),
    "a negative position": ([3, -1], [0, 0]),
    "a pair given twice": ([3, 4, 3], [0, 0, 0]),
    "a pair given twice, apart": ([3, 5, 3], [0, 1, 0]),
    "a pair stored already": ([3, 2], [0, 0]),
    "a pair stored already, of another order": ([7, 0, 3], [1, 1, 0]),
    "a sequence beyond the last": ([3], [2]),
    "a sequence beyond the last, among others": ([3, 0], [0, 9]),
    "a negative sequence": ([3], [-1]),
    "more positions than sequences": ([3, 4], [0]),
    "more sequences than positions": ([3], [0, 1]),
    "a position beyond I32": ([2**31], [0]),
    "positions that are no integers": ([3.5], [0]),
    "sequences that are no integers": ([3], [0.5]),
}


class BatchTests(CacheCase):
    @every_kind
    @pytest.mark.parametrize(("positions", "sequences"), list(REFUSED.values()), ids=list(REFUSED))
    def test_a_batch_that_cannot_be_stored_is_refused_and_changes_nothing(
        self, rig: MakeRig, kind: Setup, positions: Any, sequences: Any
    ) -> None:
        r = rig(kind)
        r.forward([0, 1, 2, 0, 1], [0, 0, 0, 1, 1])
        with pytest.raises(kvcache.InvalidBatchError) as caught:
            r.cache.start_forward(r.ctx, Batch(positions, sequences))
        assert isinstance(caught.value, ValueError)
        assert len(str(caught.value)) > 20
        r.check_figures()
        r.check_seen()  # the pass before goes on
        r.drain()

    def test_a_batch_of_one_is_taken(self, rig: MakeRig) -> None:
        r = rig()
        assert r.forward([0], 0)
        assert r.forward([1], [0])

    @every_kind
    def test_several_sequences_come_in_any_order_and_with_gaps(self, rig: MakeRig, kind: Setup) -> None:
        r = rig(kind, max_sequences=3)
        assert r.forward([2, 0, 1, 5, 0, 0, 3], [1, 0, 1, 0, 1, 2, 1])
        assert r.forward([6, 4, 1], [0, 1, 2])
        assert r.forward([9, 9, 8], [2, 0, 0])
        r.drain()

    @every_kind
    def test_positions_may_go_into_gaps_and_before_the_first(self, rig: MakeRig, kind: Setup) -> None:
        r = rig(kind)
        r.forward([4, 9], 0)
        r.forward([5], 0)
        r.forward([3, 6], 0)
        r.forward([10], 0)
        r.drain()

    def test_numpy_arrays_tuples_and_ranges_are_batches(self, rig: MakeRig) -> None:
        r = rig()
        makers: list[Any] = [np.array, tuple, list]
        for i, make in enumerate(makers):
            r.cache.start_forward(r.ctx, Batch(make([2 * i, 2 * i + 1]), make([0, 0])))
        zeros: Any = np.zeros(2, np.int32)
        r.cache.start_forward(r.ctx, Batch(range(6, 8), zeros))
        assert r.cache.positions(0).tolist() == list(range(8))

    def test_the_same_position_of_two_sequences_is_two_tokens(self, rig: MakeRig) -> None:
        r = rig()
        assert r.forward([0, 0], [0, 1])
        assert r.cache.free_cells == r.cache.cells - 2

    def test_a_batch_larger_than_max_batch_is_taken_where_it_fits(self, rig: MakeRig) -> None:
        assert rig(max_batch=1).forward(range(16), 0)
        assert rig(window=2, max_batch=4, max_sequences=1).forward(range(6), 0)

    def test_a_sequence_may_use_what_the_others_leave(self, rig: MakeRig) -> None:
        r = rig(capacity=4, max_sequences=3)
        assert r.forward(range(12), 2)
        assert r.cache.free_cells == 0

    @every_kind
    def test_a_failed_forward_is_taken_back_by_remove(self, rig: MakeRig, kind: Setup) -> None:
        r = rig(kind, layers=2)
        r.forward([0, 1, 0], [0, 0, 1])
        r.start([2, 3, 1], [0, 0, 1])
        r.cache.set_layer(0)
        r.remove(0, 2)  # the model failed between layers
        r.remove(1, 1)
        assert r.forward([2, 1, 3], [0, 1, 0])
        r.drain()

    @every_kind
    def test_a_start_can_be_taken_back_evictions_included(self, rig: MakeRig, kind: Setup) -> None:
        r = rig(kind, max_sequences=3)
        r.forward([0, 1, 2, 3, 4, 0], [0, 0, 0, 0, 0, 1])
        r.copy_prefix(0, 2, 5)
        for positions, sequences in (([5], [0]), ([9, 3, 8, 7], [0, 1, 0, 2]), ([1, 6, 2], [1, 0, 1])):
            r.start_and_undo(positions, sequences)
            with pytest.raises(kvcache.OrderError):
                r.cache.get(r.ctx)
        r.cache.undo_forward()  # there is nothing more to take back
        r.check_figures()
        r.forward([5, 1, 5], [0, 1, 2])
        r.drain()

    def test_other_fields_of_a_batch_are_left_alone(self, backend: ml.Backend, ctx: ml.Context) -> None:
        cache = Setup().make(backend)
        batch = Batch([0], [0], multimodal=[(0, object())], inputs=object(), outputs=[0])
        cache.start_forward(ctx, batch)
        assert len(batch) == 1
