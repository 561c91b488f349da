"""Masks made on the backend, and masks kept between steps, against those that the host builds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ml
from kvcache import Batch, CausalCache, ChunkedCache, SlidingWindowCache
from kvcache.attention import masks
from kvcache.storage.device_copies import HostArrays

from ...rigs.each_backend import each_backend

KINDS: dict[str, Callable[[], Any]] = {
    "causal": CausalCache,
    "window": lambda: SlidingWindowCache(6, memory=9),
    "window with the first kept": lambda: SlidingWindowCache(4, memory=6, keep=3),
    "chunked": lambda: ChunkedCache(5),
}
every_kind = pytest.mark.parametrize("make", list(KINDS.values()), ids=list(KINDS))
every_padding = pytest.mark.parametrize("padding", [1, 4])
SEQUENCES = 3
CAPACITY = 36  # so little that sequences are read as one view: what is gathered keeps no mask


backend = each_backend("numpy", "torch")


@pytest.fixture(autouse=True)
def no_mask_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "HOST_LIMIT", 0)
    monkeypatch.setattr(masks, "KEEP_LIMIT", 0)
    monkeypatch.setattr(masks, "_SPARE", 5)


class Follower:
    """A cache whose masks are compared with the host's, pass by pass."""

    def __init__(
        self, backend: ml.Backend, ctx: ml.Context, make: Callable[[], Any], padding: int = 1
    ) -> None:
        self.ctx, self.padding = ctx, padding
        self.cache = make()
        self.cache.set_config(ml.CacheConfig(cache_padding=padding, mask_batch_padding=padding))
        self.cache.init(backend, ml.DType.F32, SEQUENCES, CAPACITY, 16)

    def put(self, positions: list[int], sequences: list[int], except_: tuple[int, ...] = ()) -> None:
        self.cache.start_forward(self.ctx, Batch(positions, sequences))
        if except_:
            self.cache.set_causal(self.ctx, except_=except_)
        some = self.ctx.zeros((len(positions), 1, 1), ml.DType.F32)
        self.cache.put(self.ctx, some, some)

    def step(self, positions: list[int], sequences: list[int], except_: tuple[int, ...] = ()) -> ml.Tensor:
        self.put(positions, sequences, except_)
        mask = self.cache.get(self.ctx)[2]
        plan = self.cache.pass_under_way().reading
        history, _ = plan.shared(self.ctx)
        expected = history.mask(len(positions), plan.lower, plan.lifted, self.padding)
        np.testing.assert_array_equal(mask.to_numpy(), expected)
        return mask

    def decode(self, position: int, sequences: list[int]) -> ml.Tensor:
        return self.step([position] * len(sequences), sequences)


@every_kind
@every_padding
def test_a_mask_made_on_the_backend_is_the_hosts(
    backend: ml.Backend, make: Callable[[], Any], padding: int
) -> None:
    rng = np.random.default_rng(8)
    with backend.new_context() as ctx:
        follower = Follower(backend, ctx, make, padding)
        ends = [0] * SEQUENCES
        for _ in range(16):
            chosen = rng.permutation(SEQUENCES)[: rng.integers(1, SEQUENCES + 1)].tolist()
            counts = [int(rng.integers(1, 5)) for _ in chosen]
            places = [(ends[s] + i, s) for s, n in zip(chosen, counts, strict=True) for i in range(n)]
            if rng.random() < 0.3:
                places = [places[i] for i in rng.permutation(len(places))]
            except_ = (int(rng.integers(len(places))),) if rng.random() < 0.4 else ()
            follower.step([p for p, _ in places], [s for _, s in places], except_)
            for s, n in zip(chosen, counts, strict=True):
                ends[s] += n


@every_kind
@every_padding
def test_a_kept_mask_follows_every_step(backend: ml.Backend, make: Callable[[], Any], padding: int) -> None:
    with backend.new_context() as ctx:
        follower = Follower(backend, ctx, make, padding)
        for seq in range(SEQUENCES):
            follower.step(list(range(4 + seq)), [seq] * (4 + seq))
        for i in range(29):
            follower.step([4 + i, 6 + i, 5 + i], [0, 2, 1])


def test_a_kept_mask_is_written_in_place_and_not_made_anew(backend: ml.Backend) -> None:
    with backend.new_context() as ctx:
        follower = Follower(backend, ctx, CausalCache)
        for seq in range(SEQUENCES):
            follower.step([0, 1], [seq] * 2)
        kept = []
        for position in range(2, 12):
            follower.decode(position, [0, 1, 2])
            kept.append(follower.cache.pass_under_way().reading.kept)
        assert len({id(mask) for mask in kept}) <= 4  # a new one whenever the spare columns are used up


def test_what_happens_between_steps_is_not_missed(backend: ml.Backend) -> None:
    with backend.new_context() as ctx:
        follower = Follower(backend, ctx, CausalCache)
        everyone = list(range(SEQUENCES))
        for seq in everyone:
            follower.step([0, 1, 2], [seq] * 3)
        follower.decode(3, everyone)
        kept = follower.cache.pass_under_way().reading.kept
        follower.put([4] * SEQUENCES, everyone)  # nobody asks for its mask
        follower.decode(5, everyone)
        assert follower.cache.pass_under_way().reading.kept is kept, "written anew where it lies"
        follower.step([6], [1])  # another batch
        follower.step([6, 6], [0, 2])
        follower.decode(7, everyone)
        follower.decode(8, everyone[::-1])  # another order
        follower.cache.remove(1, 7)
        follower.step([9, 7, 9], everyone)
        follower.cache.copy_prefix(0, 2, 3)
        follower.step([10, 8, 3], everyone)
        follower.step([11, 9, 4], everyone, (1,))  # an except list
        follower.step([12, 10, 5], everyone)


def test_a_call_of_one_sequence_has_the_mask_that_the_host_would_write(
    backend: ml.Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        first, stop = np.sort(rng.integers(0, 13, (2, 1, 5)), axis=0)
        found = []
        for limit in (0, 1 << 20):
            monkeypatch.setattr(masks, "HOST_LIMIT", limit)
            host = HostArrays()
            mask = masks.seen_mask(host, np.stack((first, stop)), 8, 13, ml.DType.F16)
            with backend.new_context() as ctx:
                found.append(mask.on(ctx))
        assert found[0].dtype is found[1].dtype is ml.DType.F16
        assert found[0].to_numpy().tolist() == found[1].to_numpy().tolist()
