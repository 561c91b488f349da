"""remove: at the end, in the middle with a shift, what it refuses, and that a refusal changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvcache
import ml
from kvcache import Batch
from kvcache.testing import values
from kvcache.testing.harness import CacheCase, MakeRig, computes, every_arrangement, every_kind
from kvcache.testing.model import Setup
from ml import DType, nn

__all__ = ["RemovalTests"]


class RemovalTests(CacheCase):
    # At the end.

    @every_kind
    @every_arrangement
    def test_the_end_of_a_sequence_can_be_taken_off_and_written_anew(
        self, rig: MakeRig, kind: Setup, arranged: ml.CacheConfig
    ) -> None:
        r = rig(kind, config=arranged, can_shift=False)
        r.forward([0, 1, 2, 3, 0, 1], [0, 0, 0, 0, 1, 1])
        r.remove(0, 3)
        r.extend(0, 2)
        r.remove(1, 1)
        r.forward([1, 5], [1, 0])
        r.drain()

    @every_kind
    def test_a_whole_sequence_goes_and_its_cells_are_free(self, rig: MakeRig, kind: Setup) -> None:
        r = rig(kind)
        r.forward([0, 1, 0], [0, 0, 1])
        r.remove(0, 0)
        assert r.cache.held() == {1: 1}
        assert r.cache.free_cells == r.cache.cells - 1
        r.forward([0, 1, 1], [0, 0, 1])
        r.drain()

    @pytest.mark.parametrize(("begin", "end"), [(5, None), (9, 12), (2, 2), (0, 0), (4, 100)])
    def test_a_range_that_holds_nothing_removes_nothing(
        self, rig: MakeRig, begin: int, end: int | None
    ) -> None:
        r = rig(can_shift=False)
        r.forward([0, 1, 2, 3], 0)
        assert r.remove(0, begin, end)
        assert r.cache.positions(0).tolist() == [0, 1, 2, 3]
        r.extend(0)
        assert r.remove(1, 0)
        assert r.remove(1, 0, 5)

    def test_a_range_that_reaches_the_end_needs_no_shift_function(self, rig: MakeRig) -> None:
        r = rig(can_shift=False)
        r.forward([0, 1, 2, 3], 0)
        assert r.remove(0, 2, 4)
        assert r.remove(0, 1, 100)
        r.extend(0)
        r.drain()

    # In the middle.

    @every_arrangement
    @pytest.mark.parametrize(("begin", "end"), [(0, 1), (0, 3), (1, 2), (2, 5), (4, 5)])
    def test_what_follows_moves_down_with_its_keys_re_encoded(
        self, rig: MakeRig, begin: int, end: int, arranged: ml.CacheConfig
    ) -> None:
        r = rig(config=arranged, layers=2)
        r.forward([0, 1, 2, 3, 4, 5, 0, 1], [0, 0, 0, 0, 0, 0, 1, 1])
        assert r.remove(0, begin, end)
        assert r.cache.positions(0).tolist() == list(range(6 - (end - begin)))
        r.forward([r.model.last(0) + 1, 2], [0, 1])
        r.drain()

    def test_gaps_move_down_as_they_are(self, rig: MakeRig) -> None:
        r = rig()
        r.forward([0, 4, 7, 9], 0)
        assert r.remove(0, 1, 3)  # nothing is stored there
        assert r.cache.positions(0).tolist() == [0, 2, 5, 7]
        r.extend(0)
        r.drain()

    def test_scattered_cells_are_shifted_too(self, rig: MakeRig) -> None:
        r = rig(max_sequences=3, capacity=8)
        for position in range(4):
            r.forward([position] * 3, [2, 0, 1])
        r.forward([7, 5, 6, 4], 0)
        r.remove(1, 1)
        assert r.remove(0, 1, 3)
        assert r.remove(2, 0, 2)
        r.forward([6, 2, 1], [0, 2, 1])
        r.drain()

    def test_nothing_is_shifted_before_anything_is_put(self, rig: MakeRig) -> None:
        r = rig()
        r.start([0, 1, 2], [0, 0, 0])
        assert r.remove(0, 0, 1)
        assert r.cache.positions(0).tolist() == [0, 1]

    def test_the_shift_function_is_given_what_moves_and_by_how_much(
        self, backend: ml.Backend, ctx: ml.Context
    ) -> None:
        calls: list[tuple[int, list[int], list[int]]] = []

        def shift(ctx: ml.Context, layer: int, key: ml.Tensor, offsets: ml.Tensor) -> ml.Tensor:
            ids, _ = values.decode(key.to_numpy().astype(np.float32))
            calls.append((layer, ids.tolist(), offsets.to_numpy().tolist()))
            return values.shift_positions(ctx, layer, key, offsets)

        cache = kvcache.CausalCache(shift)
        cache.init(backend, DType.F32, 2, 8, 8)
        self._fill(ctx, cache, [0, 1, 2, 3, 4], layers=2)
        cache.remove(0, 1, 3)
        assert sorted(layer for layer, _, _ in calls) == [0, 1], "once a layer"
        for _, ids, offsets in calls:
            moved = {token: offset for token, offset in zip(ids, offsets, strict=True) if offset}
            assert moved == {4: -2, 5: -2}, "tokens are numbered from 1"

    @staticmethod
    def _fill(ctx: ml.Context, cache: kvcache.CausalCache, positions: list[int], layers: int = 1) -> None:
        cache.start_forward(ctx, Batch(positions, [0] * len(positions)))
        ids = range(1, len(positions) + 1)
        for layer in range(layers):
            cache.set_layer(layer)
            key, value = values.keys(ids, positions, layer), values.values(ids, layer)
            cache.put(ctx, ctx.from_numpy(key), ctx.from_numpy(value))

    @computes
    @pytest.mark.parametrize("interleaved", [False, True])
    def test_rotated_keys_equal_those_computed_at_their_new_positions(
        self, backend: ml.Backend, ctx: ml.Context, interleaved: bool
    ) -> None:
        spec = nn.RopeSpec(8, interleaved=interleaved)
        cache = kvcache.CausalCache(nn.rope_shift(spec))
        cache.set_config(ml.CacheConfig())
        cache.init(backend, DType.F32, 1, 16, 16)
        raw = np.random.default_rng(5).standard_normal((12, 2, 8)).astype(np.float32)

        def put(positions: list[int], rows: np.ndarray) -> None:
            cache.start_forward(ctx, Batch(positions, [0] * len(positions)))
            key = nn.rope(ctx, ctx.from_numpy(rows), positions, spec)
            cache.put(ctx, key, ctx.from_numpy(rows))

        put(list(range(10)), raw[:10])
        cache.remove(0, 2, 5)
        put([7, 8], raw[10:])
        key, value, mask = cache.get(ctx)
        assert isinstance(mask, ml.Tensor)
        seen = mask.to_numpy()[1] == 0
        left = np.concatenate([raw[:2], raw[5:]])
        expected = nn.rope(ctx, ctx.from_numpy(left), list(range(9)), spec).to_numpy()
        found_value = value.to_numpy()[seen]
        order = [int(np.flatnonzero((found_value == row).all(axis=(1, 2)))[0]) for row in left]
        np.testing.assert_allclose(key.to_numpy()[seen][order], expected, rtol=1e-5, atol=1e-5)

    # Refusals.

    @pytest.mark.parametrize(("begin", "end"), [(0, 1), (1, 3), (3, 4)])
    def test_without_a_shift_function_nothing_moves(self, rig: MakeRig, begin: int, end: int) -> None:
        r = rig(can_shift=False)
        r.forward([0, 1, 2, 5], 0)
        with pytest.raises(kvcache.NotSupportedError) as caught:
            r.cache.remove(0, begin, end)
        assert isinstance(caught.value, ml.NotSupportedError)
        assert "shift" in str(caught.value)
        r.check_figures()
        r.check_seen()
        r.drain()

    def test_shared_tokens_do_not_move_whoever_asks(self, rig: MakeRig) -> None:
        r = rig()
        r.forward([0, 1, 2, 3], 0)
        r.copy_prefix(0, 1, 4)
        r.extend(1)
        for seq in (0, 1):
            for begin, end in ((0, 1), (1, 3)):
                assert not r.remove(seq, begin, end)
                assert isinstance(r.refusal, kvcache.NotSupportedError)
        r.extend(1)
        r.extend(0)
        r.drain()

    def test_shared_tokens_before_what_moves_only_lose_this_sequence(self, rig: MakeRig) -> None:
        r = rig()
        r.forward([0, 1, 2], 0)
        r.copy_prefix(0, 1, 3)
        r.forward([3, 4, 3], [1, 1, 0])
        assert r.remove(1, 1, 3)
        assert r.cache.positions(1).tolist() == [0, 1, 2]
        assert r.cache.positions(0).tolist() == [0, 1, 2, 3]
        r.forward([4, 3], [0, 1])
        r.drain()

    def test_what_was_shared_moves_once_the_other_is_gone(self, rig: MakeRig) -> None:
        r = rig()
        r.forward([0, 1, 2], 0)
        r.copy_prefix(0, 1, 3)
        assert not r.remove(0, 0, 1)
        r.remove(1, 0)
        assert r.remove(0, 0, 1)
        r.drain()

    @pytest.mark.parametrize(
        ("begin", "end", "done"),
        [(8, 10, False), (7, 9, False), (6, 8, False), (2, 8, False), (0, 8, True), (0, 1, True)],
    )
    def test_a_window_that_could_not_resume_refuses(
        self, rig: MakeRig, begin: int, end: int, done: bool
    ) -> None:
        # Positions 6 to 10 are stored, the next query is at 11 and sees 7 and up.
        r = rig(window=4, max_sequences=1, max_batch=8, capacity=32)
        for first, stop in ((0, 5), (5, 10), (10, 11)):
            r.forward(range(first, stop), 0)
        assert r.cache.positions(0).tolist() == [6, 7, 8, 9, 10]
        assert r.remove(0, begin, end) == done
        if not done:
            assert isinstance(r.refusal, kvcache.NotSupportedError)
            r.forward([11], 0)
        else:
            r.extend(0)
        r.drain()

    def test_memory_lets_a_window_lose_its_middle(self, rig: MakeRig) -> None:
        r = rig(window=2, memory=6, max_sequences=1, capacity=32)
        r.forward(range(8), 0)
        r.forward([8], 0)
        assert r.cache.positions(0).tolist() == [2, 3, 4, 5, 6, 7, 8]
        assert r.remove(0, 4, 7)
        assert r.cache.positions(0).tolist() == [2, 3, 4, 5]
        assert r.remove(0, 2, 4)  # 4 and 5 become 2 and 3, and a query at 4 sees from 2
        assert not r.remove(0, 2, 3)  # 3 would become 2, and a query at 3 sees from 1
        r.extend(0)

    @pytest.mark.parametrize(("begin", "end"), [(-1, None), (-2, 3), (3, 2), (1, 0), (0, -1)])
    def test_a_range_that_means_nothing_is_refused(self, rig: MakeRig, begin: int, end: int | None) -> None:
        r = rig()
        r.forward([0, 1, 2], 0)
        with pytest.raises(kvcache.InvalidRangeError) as caught:
            r.cache.remove(0, begin, end)
        assert isinstance(caught.value, ValueError)
        r.check_figures()
        r.check_seen()

    @pytest.mark.parametrize("seq", [-1, 2, 100])
    def test_removing_from_an_unknown_sequence_is_refused(self, rig: MakeRig, seq: int) -> None:
        r = rig()
        with pytest.raises(kvcache.InvalidBatchError):
            r.cache.remove(seq, 0)

    @pytest.mark.parametrize("fails_in", [0, 1])
    def test_a_shift_function_that_raises_leaves_all_as_it_was(self, rig: MakeRig, fails_in: int) -> None:
        r = rig(layers=2)
        r.forward([0, 1, 2, 3], 0)

        def shift(ctx: ml.Context, layer: int, key: ml.Tensor, offsets: ml.Tensor) -> Any:
            if layer == fails_in:
                raise ZeroDivisionError("in the model")
            return values.shift_positions(ctx, layer, key, offsets)

        r.cache.editor.shift = shift
        with pytest.raises(ZeroDivisionError):
            r.cache.remove(0, 0, 2)
        r.check_figures()
        r.check_seen()
        r.drain()

    def test_a_shift_function_that_gives_another_shape_is_refused(self, rig: MakeRig) -> None:
        r = rig()
        r.forward([0, 1, 2, 3], 0)
        r.cache.editor.shift = lambda ctx, layer, key, offsets: key.slice(ctx, 0, 0, 1)
        with pytest.raises(kvcache.InvalidRangeError):
            r.cache.remove(0, 0, 2)
        r.check_figures()
        r.check_seen()
        r.drain()
