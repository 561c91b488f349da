"""What a pass may read: the layers that were put in it; in a pass that only reads, whatever is stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvcache
import ml
from kvcache import Batch
from kvcache.caches import branches
from kvcache.testing import values
from kvcache.testing.encoder import EncoderRig
from kvcache.testing.harness import CacheCase, MakeRig, attends, every_arrangement, every_kind
from kvcache.testing.model import Setup
from kvcache.testing.rig import outcome, reference_attention
from kvcache.testing.states import StateRig, StateSetup
from kvcache.testing.wrapping import ForeignCache
from ml import DType

__all__ = ["ReadingTests"]


def refusals(cache: Any, ctx: ml.Context, tokens: int) -> list[ml.MLError | None]:
    """What ``get`` and ``attend`` raise."""
    query = ctx.from_numpy(values.queries(0, tokens))
    return [outcome(lambda: cache.get(ctx)), outcome(lambda: cache.attend(ctx, query, 1.0))]


def only_order_errors(found: list[ml.MLError | None]) -> bool:
    return all(isinstance(error, kvcache.OrderError) for error in found)


class ReadingTests(CacheCase):
    # A pass that stores.

    @every_kind
    @every_arrangement
    def test_a_layer_that_was_not_put_in_this_pass_is_refused(
        self, rig: MakeRig, kind: Setup, arranged: ml.CacheConfig
    ) -> None:
        r = rig(kind, config=arranged, layers=2)
        r.forward([0, 1, 0], [0, 0, 1])
        r.start([2, 1], [0, 1])
        for layer in range(2):
            r.cache.set_layer(layer)
            found = refusals(r.cache, r.ctx, 2)
            assert only_order_errors(found)
            assert all(f"layer {layer}" in str(error) for error in found)
        r.put()
        r.check_seen()

    def test_put_of_one_layer_is_none_of_another(self, rig: MakeRig) -> None:
        r = rig(layers=2)
        r.forward([0, 1], 0)
        r.start([2], [0])
        r.put(layers=1)
        r.check_seen(layers=1)
        r.cache.set_layer(1)
        assert only_order_errors(refusals(r.cache, r.ctx, 1))
        r.put()
        r.check_seen()

    def test_a_pass_that_goes_on_has_what_was_put_in_it(self, rig: MakeRig) -> None:
        r = rig(layers=2)
        r.forward([0, 1], 0)
        under_way = r.cache.pass_under_way()
        r.cache.start_forward(r.ctx, Batch([2], [0]))
        r.cache.undo_forward(under_way)
        r.check_seen()

    @attends
    def test_layers_that_share_anothers_keys_and_values_attend_to_them(
        self, backend: ml.Backend, ctx: ml.Context
    ) -> None:
        """As the upper layers of Gemma 3n and of YOCO do: they put nothing, and name the layer that did."""
        cache = Setup(layers=2).make(backend)
        rng = np.random.default_rng(4)
        key, value, query = (rng.standard_normal((9, 2, 6)).astype(np.float32) for _ in range(3))
        source = {0: 0, 1: 1, 2: 0, 3: 1}  # layers 2 and 3 share those of 0 and 1
        for positions in (range(6), [6], [7, 8]):
            first, stop = positions[0], positions[-1] + 1
            cache.start_forward(ctx, Batch(positions, [0] * len(positions)))
            for layer, stored in source.items():
                cache.set_layer(stored)
                if layer == stored:
                    new = (ctx.from_numpy(part[first:stop] + layer) for part in (key, value))
                    cache.put(ctx, *new)
                asked = ctx.from_numpy(query[first:stop] - layer)
                found = cache.attend(ctx, asked, 0.4).to_numpy()
                for i in range(first, stop):
                    seen = key[: i + 1] + stored, value[: i + 1] + stored
                    expected = reference_attention(query[i] - layer, *seen, 0.4)
                    np.testing.assert_allclose(found[i - first], expected, rtol=1e-4, atol=1e-5)

    # A pass that only reads.

    @every_kind
    @every_arrangement
    def test_queries_see_what_a_token_there_would(
        self, rig: MakeRig, kind: Setup, arranged: ml.CacheConfig, declared: ml.Features
    ) -> None:
        r = rig(kind, max_sequences=3, config=arranged, layers=2)
        r.forward([0, 1, 2, 3, 0, 1], [0, 0, 0, 0, 1, 1])
        r.forward([4, 5], [0, 0])
        first = r.cache.positions(0)[0]
        for positions, sequences in (
            ([5], [0]),
            ([first], [0]),
            ([1, 6, 3, 0, 5], [1, 0, 0, 1, 0]),
            ([5, 4], [0, 0]),
            ([4, 5], [0, 0]),
            ([6, 7], [0, 0]),  # behind the end
        ):
            if not r.read(positions, sequences):
                assert kind.chunk, "position 4 begins a chunk"
                continue
            r.check_seen()
            if declared.has("matmul"):
                r.check_attend(len(positions))
        r.extend(0)
        r.drain()

    def test_lifted_queries_see_what_comes_after_them(self, rig: MakeRig) -> None:
        r = rig()
        r.forward(range(5), 0)
        assert r.read([1, 2], [0, 0])
        r.cache.set_causal(r.ctx, except_=[1])
        r.check_seen([1])

    @pytest.mark.parametrize(
        ("kind", "position", "seq"),
        [
            (Setup(), 0, 1),
            (Setup(), 1, 0),
            (Setup(window=2, max_sequences=2), 9, 0),
            (Setup(chunk=4), 8, 0),
        ],
        ids=["an empty sequence", "before the first token", "past the window", "in another chunk"],
    )
    def test_a_query_that_would_see_nothing_is_refused(
        self, rig: MakeRig, kind: Setup, position: int, seq: int
    ) -> None:
        r = rig(kind)
        r.forward([2, 3], 0)
        assert not r.read([3, position], [0, seq])
        assert f"position {position} of sequence {seq}" in str(r.refusal)
        r.check_seen()

    def test_it_takes_no_cell_and_evicts_nothing(self, rig: MakeRig, backend: ml.Backend) -> None:
        r = rig(window=2, max_sequences=2, capacity=50, max_batch=4)
        r.forward(range(6), 0)
        stored = backend.memory().allocated
        assert r.read([4, 5], [0, 0])
        r.check_seen()
        assert r.cache.positions(0).tolist() == [*range(6)]
        r.forward([6], 0)
        assert r.cache.positions(0).tolist() == [3, 4, 5, 6]
        assert backend.memory().allocated <= stored + 64

    def test_a_full_cache_can_be_read(self, rig: MakeRig) -> None:
        r = rig(max_sequences=1, capacity=4)
        r.forward(range(4), 0)
        assert r.read([2, 3], [0, 0])
        r.check_seen()

    def test_snapshots_that_are_scheduled_stay_due(self, rig: MakeRig) -> None:
        r = rig()
        r.forward(range(3), 0)
        r.cache.schedule_snapshots(0, [4])
        assert r.read([2, 4, 7], [0, 0, 0])
        assert r.cache.snapshots_taken(0) == []
        r.forward([3, 4], 0)
        assert [snapshot.end for snapshot in r.cache.take_snapshots(0)] == [4]

    def test_undoing_it_ends_it_and_goes_on(self, rig: MakeRig) -> None:
        r = rig()
        r.forward(range(3), 0)
        under_way, before = r.cache.pass_under_way(), r.pass_
        assert r.read([1], [0])
        r.cache.undo_forward(under_way)
        r.pass_ = before
        r.check_seen()
        assert r.read([1], [0])
        r.cache.undo_forward()
        assert only_order_errors(refusals(r.cache, r.ctx, 1))
        r.check_figures()

    def test_layers_that_lack_the_last_tokens_are_refused(self, rig: MakeRig) -> None:
        """As after a pass that failed between two layers."""
        r = rig(layers=2)
        r.forward([0, 1], 0)
        r.start([2], [0])
        r.put(layers=1)
        for _ in range(2):
            assert r.read([1], [0])
            r.check_seen(layers=1)
            r.cache.set_layer(1)
            assert only_order_errors(refusals(r.cache, r.ctx, 1))
        r.remove(0, 2)
        assert r.read([1], [0])
        r.check_seen()

    def test_reserving_and_only_reading_exclude_one_another(self, rig: MakeRig) -> None:
        r = rig()
        r.forward([0, 1], 0)
        encoder, states = kvcache.EncoderCache(), StateSetup().make(r.backend)
        encoder.init(r.backend, DType.F32, 2, 8, 4)
        for cache in (r.cache, encoder, states, kvcache.WrapperCache(r.cache, encoder)):
            with pytest.raises(kvcache.InvalidBatchError, match=r"reserve.*read_only"):
                cache.start_forward(r.ctx, Batch([1], [0]), reserve=True, read_only=True)
        r.check_seen()

    # The other caches.

    def test_branches_are_read_side_by_side(self, rig: MakeRig) -> None:
        r = rig(max_sequences=3)
        r.forward(range(4), 0)
        branches.fork(r.cache, 0, [1, 2])
        for branch in (1, 2):
            r.model.copy_prefix(0, branch, 4)
        r.forward([4, 4, 5], [1, 2, 2])
        assert r.read([3, 4, 5, 5, 2], [0, 1, 2, 1, 2])
        r.check_seen()

    @pytest.mark.parametrize("order", [(0, 1), (1, 0)])
    def test_a_wrapper_reads_in_all_caches_or_in_none(
        self, backend: ml.Backend, ctx: ml.Context, order: tuple[int, int]
    ) -> None:
        caches = kvcache.SlidingWindowCache(2), kvcache.CausalCache()
        wrapper = kvcache.WrapperCache(*(caches[i] for i in order))
        wrapper.set_config(ml.CacheConfig())
        wrapper.init(backend, DType.F32, 2, 8, 8)
        key, value = ctx.from_numpy(values.keys(range(1, 7), range(6))), ctx.zeros((6, 2, 5), DType.F32)
        wrapper.start_forward(ctx, Batch(range(6), [0] * 6))

        def read() -> list[int]:
            seen = []
            for i in range(2):
                wrapper.set_layer_type(order.index(i))
                mask = wrapper.get(ctx)[2]
                assert isinstance(mask, ml.Tensor)
                seen.append(int((mask.to_numpy() == 0).sum()))
            return seen

        for i in range(2):
            wrapper.set_layer_type(i)
            wrapper.put(ctx, key, value)
        everything = read()
        with pytest.raises(kvcache.InvalidBatchError):
            wrapper.start_forward(ctx, Batch([8], [0]), read_only=True)  # past the window
        assert read() == everything, "the pass before goes on"
        wrapper.start_forward(ctx, Batch([4], [0]), read_only=True)
        assert read() == [3, 5]

    def test_a_wrapped_cache_that_cannot_says_so(self, backend: ml.Backend, ctx: ml.Context) -> None:
        class Older(ForeignCache):
            def start_forward(self, ctx: ml.Context, batch: Batch, reserve: bool = False) -> None:  # type: ignore[override]
                self._ask("start_forward", ctx, batch, reserve)

        older: Any = Older(kvcache.CausalCache())
        wrapper = kvcache.WrapperCache(kvcache.EncoderCache(), older)
        wrapper.init(backend, DType.F32, 2, 8, 8)
        wrapper.start_forward(ctx, Batch([0], [0]))
        with pytest.raises(kvcache.NotSupportedError, match="Older has no read_only"):
            wrapper.start_forward(ctx, Batch([0], [0]), read_only=True)

    def test_states_are_read_as_they_stand_and_cannot_be_set(
        self, backend: ml.Backend, ctx: ml.Context
    ) -> None:
        r = StateRig(StateSetup(interval=1), backend, ctx)
        r.forward(0, 1, 0, 1, 1, 2)
        r.copy_prefix(0, 2, 2)
        r.snapshot(1)
        r.remove(1, 0)
        assert r.restore(1, 0)
        r.cache.schedule_snapshots(0, [3])
        for sequences in ([0], [2, 1], [1, 0, 2]):
            r.read(sequences)
        assert r.cache.next_snapshot(0) == 3
        r.check()
        r.forward(0, 1, 2)
        r.drain()

    def test_an_encoders_output_is_read(
        self, backend: ml.Backend, ctx: ml.Context, declared: ml.Features
    ) -> None:
        r = EncoderRig(backend, ctx)
        r.start([3, 3], [0, 1])
        r.put(2, 3)
        r.pass_ = [0, 9], [1, 0]
        r.cache.start_forward(ctx, Batch(*r.pass_, multimodal=[(1, "an image")]), read_only=True)
        r.check(declared.has("matmul"))
        key = ctx.zeros((2, values.KV_HEADS, values.KEY_DIM), DType.F32)
        with pytest.raises(kvcache.OrderError, match="only reads"):
            r.cache.put(ctx, key, key)
        r.cache.undo_forward()
        r.look(declared.has("matmul"))

    def test_an_earlier_items_output_is_not_read_for_a_later_item(
        self, backend: ml.Backend, ctx: ml.Context
    ) -> None:
        r = EncoderRig(backend, ctx)
        r.start([0, 0], [0, 1])
        r.put(2, 3)
        r.start([4, 1], [0, 1], items=[0])
        r.cache.set_layer(0)
        assert only_order_errors(refusals(r.cache, ctx, 2))
        r.put(4)
        r.check(computes=False)
        r.start([4], [0], items=[0])  # the same item once more
        r.check(computes=False)
