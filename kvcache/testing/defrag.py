"""defrag: data and metadata move together."""

from __future__ import annotations

from itertools import permutations

import pytest

import ml
from kvcache.testing.harness import CacheCase, MakeRig, every_arrangement, every_kind
from kvcache.testing.model import Setup
from kvcache.testing.rig import Rig

__all__ = ["DefragTests"]


class DefragTests(CacheCase):
    @every_kind
    @every_arrangement
    def test_every_token_is_found_again(self, rig: MakeRig, kind: Setup, arranged: ml.CacheConfig) -> None:
        r = rig(kind, max_sequences=3, config=arranged, layers=2)
        self._fragment(r)
        r.defrag()
        r.forward([r.model.last(seq) + 1 for seq in range(3)], [0, 1, 2])
        r.defrag()
        r.drain()

    @staticmethod
    def _fragment(r: Rig) -> None:
        for position in range(4):
            r.forward([position] * 3, [2, 0, 1])
        r.remove(1, 2)
        r.forward([5, 4], 0)
        r.remove(2, 1)
        r.forward([2, 6, 1], [1, 0, 2])

    @pytest.mark.parametrize("order", list(permutations(range(4))), ids=str)
    def test_cells_in_any_order_come_apart_and_together(self, rig: MakeRig, order: tuple[int, ...]) -> None:
        """Every arrangement of four neighbours, two of each sequence: swaps and cycles among them."""
        r = rig(max_sequences=2, capacity=4)
        r.forward([place // 2 for place in order], [place % 2 for place in order])
        r.defrag()
        r.forward([2, 2], [0, 1])
        r.drain()

    def test_two_neighbours_keep_their_own_data(self, rig: MakeRig) -> None:
        r = rig(max_sequences=2, capacity=1)
        r.forward([0, 0], [1, 0])
        r.defrag()
        r.remove(0, 0)
        r.forward([0], 0)
        r.defrag()
        r.remove(1, 0)
        r.forward([1], 0)

    def test_a_shared_prefix_stays_shared(self, rig: MakeRig) -> None:
        r = rig(max_sequences=3, capacity=6)
        r.forward(range(3), 2)
        r.copy_prefix(2, 0, 2)
        r.copy_prefix(2, 1, 3)
        r.forward([2, 3, 3, 3, 4], [0, 1, 2, 0, 1])
        free = r.cache.free_cells
        r.defrag()
        assert r.cache.free_cells == free
        r.forward([4, 5, 4], [0, 1, 2])
        r.drain()

    def test_a_full_cache_can_be_defragmented(self, rig: MakeRig) -> None:
        r = rig(max_sequences=3, capacity=3)
        for position in range(3):
            r.forward([position] * 3, [1, 2, 0])
        assert r.cache.free_cells == 0
        r.defrag()
        r.remove(2, 2)
        r.drain()

    def test_an_empty_cache_and_one_without_buffers_are_no_trouble(self, rig: MakeRig) -> None:
        r = rig()
        r.defrag()
        r.start([3, 1, 2], [0, 1, 0])
        r.defrag()
        assert r.cache.positions(0).tolist() == [2, 3]

    def test_a_scattered_sequence_lies_in_one_run_afterwards(self, rig: MakeRig) -> None:
        r = rig(max_sequences=2, capacity=8, config=ml.CacheConfig(elide_mask=True))
        for position in range(3):
            r.forward([position, position], [0, 1])
        r.forward([4, 3], 0)
        r.defrag()
        r.extend(0)
        assert r.cache.get(r.ctx)[2] is None  # in order, and no stranger among them
        r.extend(1)
        assert r.cache.get(r.ctx)[2] is None
        r.drain()
