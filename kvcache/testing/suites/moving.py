"""Sharing, removing, shifting, defragmenting and evicting, with expected results that need no model."""

from __future__ import annotations

from itertools import permutations
from typing import Any, ClassVar

import numpy as np
import pytest

import kvcache
import ml
from kvcache import Batch
from kvcache.testing.harness import KINDS, CacheCase, MakeRig, computes, every_arrangement, every_kind
from kvcache.testing.models import values
from kvcache.testing.models.attention import Setup
from kvcache.testing.rigs.attention import Rig, mask_of
from kvcache.testing.rigs.protocol import Plan, only_protocol
from ml import DType, nn
from ml.testing.harness import bits
from ml.testing.samples import converted


class MovingTests(CacheCase):
    long_run: ClassVar[int] = 5_000
    """Tokens of the long run; a lazy framework may need fewer."""

    # Shared.

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

    # Removed, shifted, defragmented.

    @every_kind
    @every_arrangement
    def test_every_token_is_found_again(self, rig: MakeRig, kind: Setup, arranged: ml.CacheConfig) -> None:
        """For sequences that shared a prefix, lost their ends and middles, and were defragmented."""
        r = rig(kind, max_sequences=3, config=arranged, layers=2)
        for position in range(4):
            r.forward([position] * 3, [2, 0, 1])
        r.remove(1, 2)
        r.forward([5, 4], 0)
        r.remove(2, 1)
        r.forward([2, 6, 1], [1, 0, 2])
        r.defrag()
        r.copy_prefix(0, 2, 5)
        r.forward([r.model.last(seq) + 1 for seq in range(3)], [0, 1, 2])
        r.remove(1, 0, 1)
        r.defrag()
        r.drain()

    @every_arrangement
    @pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16], ids=lambda dtype: dtype.name)
    def test_what_was_put_is_read_bit_for_bit(
        self, rig: MakeRig, floats: list[DType], dtype: DType, arranged: ml.CacheConfig
    ) -> None:
        """Negative zeros, infinities, subnormals, ties: in a run of cells, in scattered cells, and in a
        single cell.
        """
        if dtype not in floats:
            pytest.skip(f"declared absent: {dtype.name}")
        source, expected = (part.reshape(26, 2, 26) for part in converted(DType.F32, dtype))
        r = rig(dtype=dtype, capacity=26, max_batch=20, config=arranged)
        for tokens, sequences in (([i // 2 for i in range(20)], [0, 1] * 10), (range(10, 25), 0), ([25], 0)):
            r.cache.remove(1, 0)
            r.cache.start_forward(r.ctx, Batch(tokens, np.resize(sequences, len(tokens)).tolist()))
            r.cache.set_layer(0)
            r.cache.put(r.ctx, *(r.ctx.from_numpy(part[[*tokens]]) for part in (source, source[::-1])))
        key, value, mask = r.cache.get(r.ctx)
        seen = mask_of(mask, 1, key.shape[0], arranged)[0]
        wide = value.permute(r.ctx, 2, 0, 1) if arranged.permuted_v else value
        for actual, right in ((key, expected), (wide, expected[::-1])):
            assert actual.dtype is dtype
            assert sorted(map(bytes, bits(actual.to_numpy()[seen]))) == sorted(map(bytes, bits(right)))

    def test_cells_in_any_order_come_apart_and_together(self, rig: MakeRig) -> None:
        """Every arrangement of four neighbouring cells, two of each sequence, including swaps and cycles."""
        for order in permutations(range(4)):
            r = rig(max_sequences=2, capacity=4)
            r.forward([place // 2 for place in order], [place % 2 for place in order])
            r.defrag()
            r.forward([2, 2], [0, 1])

    def test_a_scattered_sequence_lies_in_one_run_after_defrag(self, rig: MakeRig) -> None:
        r = rig(max_sequences=2, capacity=8, config=ml.CacheConfig(elide_mask=True))
        for position in range(3):
            r.forward([position, position], [0, 1])
        r.forward([4, 3], 0)
        r.defrag()
        for seq in (0, 1):
            r.extend(seq)
            assert r.cache.get(r.ctx)[2] is None  # in order, and no other sequence among them

    @every_arrangement
    @pytest.mark.parametrize("name", ["causal", "latent with extras"])
    def test_what_follows_moves_down_with_its_keys_re_encoded(
        self, rig: MakeRig, arranged: ml.CacheConfig, name: str
    ) -> None:
        for begin, end in ((0, 1), (1, 2), (2, 5), (4, 5)):
            r = rig(KINDS[name], config=arranged, layers=2)
            r.forward([0, 1, 2, 3, 4, 5, 0, 1], [0, 0, 0, 0, 0, 0, 1, 1])
            assert r.remove(0, begin, end)
            assert r.cache.positions(0).tolist() == list(range(6 - (end - begin)))
            r.forward([r.model.last(0) + 1, 2], [0, 1])

    def test_the_shift_function_is_given_what_moves_and_by_how_much(self, rig: MakeRig) -> None:
        r = rig(layers=2)
        calls: list[tuple[int, list[int], list[int]]] = []

        def shift(ctx: ml.Context, layer: int, key: ml.Tensor, offsets: ml.Tensor) -> ml.Tensor:
            ids, _ = values.decode(key.to_numpy().astype(np.float32))
            calls.append((layer, ids.tolist(), offsets.to_numpy().tolist()))
            return values.shift_positions(ctx, layer, key, offsets)

        r.forward([0, 1, 2, 3, 4], 0)
        r.cache.editor.shift = shift
        r.remove(0, 1, 3)
        assert sorted(layer for layer, _, _ in calls) == [0, 1], "once a layer"
        for _, ids, offsets in calls:
            moved = {token: offset for token, offset in zip(ids, offsets, strict=True) if offset}
            assert moved == {4: -2, 5: -2}, "tokens are numbered from 1"

    def test_a_long_sequence_moves_in_pieces_of_max_batch(self, rig: MakeRig) -> None:
        r = rig(layers=2, capacity=120, max_batch=40, max_sequences=2)
        asked: list[int] = []

        def shift(ctx: ml.Context, layer: int, key: ml.Tensor, offsets: ml.Tensor) -> ml.Tensor:
            asked.append(offsets.shape[0])
            return values.shift_positions(ctx, layer, key, offsets)

        r.forward(range(100), 0)
        r.forward(range(5), 1)
        r.cache.editor.shift = shift
        r.remove(0, 3, 7)
        assert asked == [40, 40, 40, 40, 13, 13]
        r.forward([96, 5], [0, 1])

    def test_a_shift_function_that_raises_after_a_piece_was_written_loses_just_that_sequence(
        self, rig: MakeRig
    ) -> None:
        r = rig(layers=2, capacity=120, max_batch=40, max_sequences=2)
        r.forward(range(100), 0)
        r.forward(range(5), 1)

        def raises(ctx: ml.Context, layer: int, key: ml.Tensor, offsets: ml.Tensor) -> ml.Tensor:
            if offsets.shape[0] < 40:
                raise ZeroDivisionError("in the model")
            return values.shift_positions(ctx, layer, key, offsets)

        r.cache.editor.shift = raises
        with pytest.raises(ZeroDivisionError):
            r.cache.remove(0, 3, 7)
        r.model.lost = {0}
        r.check_figures()
        assert not r.forward([100], 0), "it says that it is lost"
        r.forward([5], 1)
        r.remove(0, 0)
        r.forward(range(3), 0)
        r.drain()

    @pytest.mark.parametrize("fails_in", [0, 1])
    def test_a_shift_function_that_raises_or_gives_another_shape_leaves_all_as_it_was(
        self, rig: MakeRig, fails_in: int
    ) -> None:
        r = rig(layers=2)
        r.forward([0, 1, 2, 3], 0)

        def raises(ctx: ml.Context, layer: int, key: ml.Tensor, offsets: ml.Tensor) -> Any:
            if layer == fails_in:
                raise ZeroDivisionError("in the model")
            return values.shift_positions(ctx, layer, key, offsets)

        def cuts(ctx: ml.Context, layer: int, key: ml.Tensor, offsets: ml.Tensor) -> Any:
            return key.slice(ctx, 0, 0, 1) if layer == fails_in else key

        for shift, error in ((raises, ZeroDivisionError), (cuts, kvcache.InvalidRangeError)):
            r.cache.editor.shift = shift
            with pytest.raises(error):
                r.cache.remove(0, 0, 2)
            r.check_figures()
            r.check_seen()
        r.drain()

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

    # Eviction.

    @every_kind
    @every_arrangement
    def test_evicted_tokens_leave_gaps_and_nothing_else_moves(
        self, rig: MakeRig, kind: Setup, arranged: ml.CacheConfig
    ) -> None:
        r = rig(kind, max_sequences=3, layers=2, config=arranged, can_shift=False)
        r.forward(range(4), 0)
        r.copy_prefix(0, 1, 4)
        assert r.evict(0, [1, 2])
        assert r.evict(0, [1, 2]), "what is gone already is passed over"
        assert r.cache.positions(1).tolist() == [0, 1, 2, 3], "what is shared stays the other's"
        r.forward([4, 5, 4], [0, 0, 1])
        r.defrag()
        r.copy_prefix(0, 2, 5)
        r.evict(1, [0, 3])
        r.forward([6, 5, 5], [0, 1, 2])
        for wrong in ([6], [7], [-1], [2, 6]):
            assert not r.evict(0, wrong)
        r.drain()

    def test_evicting_calls_no_backend_and_gives_cells_back(self, backend: ml.Backend) -> None:
        plan = Plan()
        limited = only_protocol(backend, plan)
        with limited.new_context() as ctx:
            r = Rig(Setup(max_sequences=1, capacity=8), limited, ctx)
            r.forward(range(8), 0)
            plan.arm(None)
            r.evict(0, range(2, 7))
            assert plan.calls == []
            assert r.cache.free_cells == 5
            r.forward(range(8, 13), 0)

    def test_a_snapshot_of_a_sequence_with_gaps_brings_them_back(self, rig: MakeRig) -> None:
        r = rig(layers=2, max_sequences=2)
        r.forward(range(8), 0)
        r.evict(0, [1, 2, 5])
        whole, rest = r.cache.snapshot(0), r.cache.snapshot(0, 4)
        assert whole.positions.tolist() == [0, 3, 4, 6, 7]
        whole.detach()
        r.remove(0, 0)
        assert r.cache.restore(1, whole)
        assert r.cache.positions(1).tolist() == [0, 3, 4, 6, 7]
        assert r.cache.offset(1) == 8
        r.cache.remove(1, 4)
        assert not r.cache.restore(1, rest), "what lies before it is not all there"

    @pytest.mark.parametrize("chunk", [None, 3], ids=["causal", "chunked"])
    def test_a_snapshot_ends_and_is_restored_right_behind_a_stored_token_only(
        self, rig: MakeRig, chunk: int | None
    ) -> None:
        r = rig(Setup(chunk=chunk))
        r.forward(range(6), 0)
        r.evict(0, [2, 3])
        whole = r.cache.snapshot(0)
        first, rest = r.cache.split(whole, 3)
        for end in (3, 4):
            with pytest.raises(kvcache.NotSupportedError, match=rf"position {end - 1} .* end it at 2"):
                r.cache.snapshot(0, 0, end)
            assert not r.cache.restore(0, whole, end)
            assert r.cache.positions(0).tolist() == [0, 1, 4, 5], "nothing changes"
        assert first is not None
        assert not r.cache.restore(0, first), "its end lies in the gap"
        assert r.cache.restore(0, r.cache.merge(first, rest), 5)
        assert r.cache.offset(0) == 5
        assert r.cache.restore(0, whole, 2)
        assert r.cache.offset(0) == 2

    def test_scheduled_snapshots_of_evicted_tokens_are_dropped(self, rig: MakeRig) -> None:
        r = rig()
        r.cache.schedule_snapshots(0, [2, 4, 6])
        r.forward(range(6), 0)
        r.evict(0, [3])
        assert [taken.end for taken in r.cache.snapshots_taken(0)] == [2]
        assert r.cache.rolled_back(0) == 3

    @pytest.mark.parametrize(
        ("setup", "passes", "stored"),
        [
            (Setup(window=2, max_sequences=1, capacity=50), [[0], [1], [2], [3], [4]], [2, 3, 4]),
            (Setup(window=2, max_sequences=1, capacity=50), [range(6), [8, 6, 7]], [4, 5, 6, 7, 8]),
            (Setup(window=1, memory=4, max_sequences=1, capacity=50), [range(7), [7]], [3, 4, 5, 6, 7]),
            (Setup(window=2, capacity=50), [range(6), None], [3, 4, 5]),
            (Setup(window=2, memory=16, max_sequences=1), [[p] for p in range(16)], [*range(16)]),
            (Setup(chunk=3, max_sequences=1), [[p] for p in range(16)], [*range(16)]),
        ],
        ids=["window", "lowest of the batch", "memory", "other sequence", "whole capacity", "chunked"],
    )
    def test_a_token_leaves_when_the_next_batch_no_longer_needs_it(
        self, rig: MakeRig, setup: Setup, passes: list[list[int] | None], stored: list[int]
    ) -> None:
        """``None`` is a pass of another sequence: with several sequences, a window keeps one position more
        than it shows.
        """
        r = rig(setup)
        for positions in passes:
            assert r.forward([0], 1) if positions is None else r.forward(positions, 0)
        assert r.cache.positions(0).tolist() == stored
        r.drain()

    @every_arrangement
    def test_the_first_tokens_stay_while_the_window_slides(
        self, rig: MakeRig, arranged: ml.CacheConfig
    ) -> None:
        """After eviction, undo, sharing, snapshots and a move of the window."""
        r = rig(window=2, keep=3, max_sequences=3, capacity=40, layers=2, config=arranged)
        r.forward(range(8), 0)
        r.forward([8, 9, 10], 0)
        r.copy_prefix(0, 1, 40)
        snapshot = r.cache.snapshot(1)
        r.start_and_undo([20, 11], [0, 1])
        r.forward([11, 11, 12], [0, 1, 0])
        assert r.cache.positions(0).tolist()[:3] == [0, 1, 2]
        assert r.cache.held()[0] == 3 + 3 + 2, "the first, the window with one more, and the batch"
        r.forward([16, 12], [0, 1])  # after a gap, the batch alone fills the window
        r.start_and_undo([30], [0])
        assert r.cache.visible(0) == 3 + 1
        assert r.cache.restore(2, snapshot)
        assert r.cache.positions(2).tolist() == [0, 1, 2, 8, 9, 10]

    def test_with_several_sequences_a_kept_beginning_is_shared_and_goes_with_the_last(
        self, rig: MakeRig
    ) -> None:
        r = rig(window=2, keep=2, max_sequences=2, capacity=40)
        r.forward(range(8), 0)
        r.copy_prefix(0, 1, 2)
        assert r.cache.can_resume(1, 2)
        for position in range(2, 7):
            r.forward([position + 6, position], [0, 1])
        r.remove(0, 0)
        r.defrag()
        r.forward([7, 8], 1)
        r.drain()

    @every_arrangement
    def test_a_sequence_resumed_where_it_can_be_sees_what_it_saw_before(
        self, rig: MakeRig, arranged: ml.CacheConfig
    ) -> None:
        for back in range(6, 10):
            r = rig(window=2, memory=4, max_sequences=2, capacity=40, config=arranged)
            r.forward([0, 1], 1)
            r.forward(range(9), 0)
            r.forward([9, 2], [0, 1])
            if r.cache.can_resume(0, back):
                r.remove(0, back)
                assert r.forward([back, back + 1, 3], [0, 0, 1])

    def test_a_long_run_through_a_small_window_stays_within_its_cells(
        self, backend: ml.Backend, ctx: ml.Context
    ) -> None:
        tokens, batch = self.long_run, 32
        cache = kvcache.SlidingWindowCache(64)
        cache.set_config(ml.CacheConfig())  # without the backend's padding
        cache.init(backend, DType.F32, 1, tokens, batch)
        key, one = ctx.zeros((batch, 1, 2), DType.F32), ctx.zeros((1, 1, 2), DType.F32)
        figures = set()
        position = 0
        while position < tokens:
            count = batch if position % 1000 < 900 else 1
            cache.start_forward(ctx, Batch(range(position, position + count), [0] * count))
            cache.put(ctx, *((key, key) if count == batch else (one, one)))
            history = cache.get(ctx)[0].shape[0]
            assert history <= cache.cells == 64 + batch
            figures.add((cache.nbytes, cache.cells))
            position += count
        assert len(figures) == 1
        assert cache.positions(0).tolist() == list(range(position - len(cache.positions(0)), position))
