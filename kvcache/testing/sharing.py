"""copy_prefix: cells are shared, counted and let go; no branch ever sees another's writes."""

from __future__ import annotations

import pytest

import kvcache
import ml
from kvcache.testing.harness import CacheCase, MakeRig, every_arrangement, every_kind
from kvcache.testing.model import Setup
from kvcache.testing.protocol import Plan, only_protocol
from kvcache.testing.rig import Rig

__all__ = ["SharingTests"]


class SharingTests(CacheCase):
    @every_kind
    def test_a_copied_prefix_takes_no_cells_and_no_call_to_the_backend(
        self, backend: ml.Backend, kind: Setup
    ) -> None:
        plan = Plan()
        limited = only_protocol(backend, plan)
        with limited.new_context() as ctx:
            r = Rig(kind, limited, ctx)
            r.forward([0, 1, 2], 0)
            free = r.cache.free_cells
            plan.arm(None)
            r.copy_prefix(0, 1, 2)
            assert plan.calls == []
            assert r.cache.free_cells == free

    @every_kind
    @every_arrangement
    def test_branches_share_a_prefix_and_nothing_after_it(
        self, rig: MakeRig, kind: Setup, arranged: ml.CacheConfig
    ) -> None:
        r = rig(kind, max_sequences=3, config=arranged)
        r.forward(range(3), 0)
        r.copy_prefix(0, 1, 3)
        r.copy_prefix(0, 2, 2)
        r.forward([3, 3, 2], [0, 1, 2])
        r.forward([4, 3, 4], [1, 2, 0])
        r.extend(0)
        r.extend(1, 2)
        r.drain()

    @every_kind
    def test_the_destination_is_emptied_first(self, rig: MakeRig, kind: Setup) -> None:
        r = rig(kind)
        r.forward([0, 1, 2, 3], 1)
        r.forward([0, 1], 0)
        r.copy_prefix(0, 1, 1)
        assert r.cache.positions(1).tolist() == [0]
        assert r.cache.free_cells == r.cache.cells - 2
        r.extend(1)
        r.drain()

    def test_a_length_of_zero_only_empties(self, rig: MakeRig) -> None:
        r = rig()
        r.forward([0, 1, 0, 1], [0, 0, 1, 1])
        r.copy_prefix(0, 1, 0)
        assert r.cache.held() == {0: 2}
        r.extend(0)

    def test_a_length_beyond_the_end_shares_all_there_is(self, rig: MakeRig) -> None:
        r = rig()
        r.forward([0, 1, 5], 0)
        r.copy_prefix(0, 1, 1000)
        assert r.cache.positions(1).tolist() == [0, 1, 5]
        r.extend(1)

    def test_the_length_counts_positions_not_tokens(self, rig: MakeRig) -> None:
        r = rig()
        r.forward([0, 3, 5, 9], 0)
        r.copy_prefix(0, 1, 5)
        assert r.cache.positions(1).tolist() == [0, 3]

    def test_copying_an_empty_sequence_empties_the_destination(self, rig: MakeRig) -> None:
        r = rig()
        r.forward([0, 1], 1)
        r.copy_prefix(0, 1, 4)
        assert r.cache.held() == {}
        assert r.cache.free_cells == r.cache.cells

    @every_kind
    def test_a_shared_cell_is_free_when_its_last_owner_lets_go(self, rig: MakeRig, kind: Setup) -> None:
        r = rig(kind, max_sequences=3)
        r.forward([0, 1], 0)
        r.copy_prefix(0, 1, 2)
        r.copy_prefix(1, 2, 2)
        for seq in (0, 2):
            r.remove(seq, 0)
            assert r.cache.free_cells == r.cache.cells - 2
        r.extend(1)
        r.remove(1, 0)
        assert r.cache.free_cells == r.cache.cells

    @every_kind
    def test_removing_the_source_leaves_the_copy_whole(self, rig: MakeRig, kind: Setup) -> None:
        r = rig(kind)
        r.forward([0, 1, 2], 0)
        r.copy_prefix(0, 1, 3)
        r.remove(0, 0)
        r.forward([0, 1, 2, 3], 0)  # new tokens at the old positions
        r.extend(1)
        r.drain()

    def test_copies_of_copies_and_back(self, rig: MakeRig) -> None:
        r = rig(max_sequences=3)
        r.forward([0, 1, 2], 0)
        r.copy_prefix(0, 1, 3)
        r.extend(1)
        r.copy_prefix(1, 2, 4)
        r.copy_prefix(2, 0, 4)
        assert r.cache.free_cells == r.cache.cells - 4
        r.forward([4, 4, 4], [0, 1, 2])
        r.drain()

    def test_a_full_cache_still_shares(self, rig: MakeRig) -> None:
        r = rig(max_sequences=2, capacity=2)
        r.forward(range(4), 0)
        r.copy_prefix(0, 1, 4)
        assert r.cache.free_cells == 0
        r.remove(0, 3)
        assert not r.extend(0)
        r.remove(1, 3)
        assert r.extend(0)

    def test_a_window_evicts_from_one_owner_and_the_other_keeps(self, rig: MakeRig) -> None:
        r = rig(window=2, max_sequences=2, capacity=20)
        r.forward([0, 1, 2], 0)
        r.copy_prefix(0, 1, 3)
        r.forward([3, 4, 5], 0)
        r.forward([6], 0)
        assert r.cache.positions(0).tolist() == [3, 4, 5, 6]
        assert r.cache.positions(1).tolist() == [0, 1, 2]
        r.extend(1)
        r.drain()

    @pytest.mark.parametrize(("src", "dst"), [(0, 2), (2, 0), (-1, 0), (0, -1), (7, 9)])
    def test_sharing_with_an_unknown_sequence_is_refused(self, rig: MakeRig, src: int, dst: int) -> None:
        r = rig()
        r.forward([0, 1], 0)
        with pytest.raises(kvcache.InvalidBatchError):
            r.cache.copy_prefix(src, dst, 1)
        r.check_figures()
        r.check_seen()

    def test_a_sequence_onto_itself_and_a_negative_length_are_refused(self, rig: MakeRig) -> None:
        r = rig()
        r.forward([0, 1, 0], [0, 0, 1])
        for src, dst, length in ((0, 0, 1), (0, 1, -1)):
            with pytest.raises(kvcache.InvalidRangeError):
                r.cache.copy_prefix(src, dst, length)
        r.check_figures()
        r.check_seen()
