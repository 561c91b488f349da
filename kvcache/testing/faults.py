"""Atomicity: each call to the backend fails in turn, before or after it has run. After any failure, the cache
is unchanged; or, if data was being moved, exactly the sequences involved are lost, report it, and can be
removed and recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

import kvcache
import ml
from kvcache import Batch
from kvcache.testing.harness import CacheCase
from kvcache.testing.models.attention import Setup
from kvcache.testing.rigs.attention import Rig
from kvcache.testing.rigs.failing import every_failure, every_way_to_fail
from kvcache.testing.rigs.protocol import InjectedError

SPARE = 3
"""A sequence that stays empty."""


@dataclass(frozen=True)
class Scenario:
    """``act`` may fail, after ``prepare``; ``follow`` applies it to the model."""

    prepare: Callable[[Rig], object]
    act: Callable[[Rig], object]
    follow: Callable[[Rig], object]
    touches: frozenset[int] = frozenset()
    """Sequences whose stored data ``act`` moves."""
    setup: Setup = field(default_factory=lambda: Setup(max_sequences=4, capacity=8, layers=2))

    def rig(self, backend: ml.Backend, ctx: ml.Context) -> Rig:
        rig = Rig(self.setup, backend, ctx)
        self.prepare(rig)
        return rig

    def check(self, r: Rig) -> None:
        """Check the cache after a failure of ``act``."""
        lost = set(_lost(r)) if self.touches else set()
        if not lost:
            r.check_figures()
            self.act(r)  # the second attempt succeeds
            self.follow(r)
            r.check_figures()
        else:
            assert lost <= self.touches, "a sequence is lost although its data was not moved"
            assert lost == self.touches, "a sequence whose data was moved is not marked as lost"
            r.model.lost = lost
            r.check_figures()
            for seq in sorted(lost):
                r.remove(seq, 0)
        r.drain()


def _fill(r: Rig) -> None:
    """Three sequences, interleaved; sequence 0 lies in one run at the start."""
    r.forward(range(3), 0)
    for position in range(2):
        r.forward([position, position], [2, 1])
    r.forward([3, 2], 2)


def _scatter(r: Rig) -> None:
    """Sequence 1 outgrows its run of cells and continues behind sequence 2."""
    for seq, tokens in enumerate((3, 8, 2)):
        r.forward(range(tokens), seq)
    r.forward([8], 1)


def _start(positions: list[int], sequences: list[int]) -> Scenario:
    return Scenario(
        _fill,
        lambda r: r.cache.start_forward(r.ctx, Batch(positions, sequences)),
        lambda r: _taken(r, positions, sequences),
    )


def _taken(r: Rig, positions: list[int], sequences: list[int]) -> None:
    r.model.start(positions, sequences, range(r.next_token, r.next_token + len(positions)))
    r.next_token += len(positions)
    r.pass_ = positions, sequences
    r.put()
    r.check_seen()


def _put(positions: list[int], sequences: list[int], fill: bool) -> Scenario:
    def prepare(r: Rig) -> None:
        if fill:
            _fill(r)
        r.start(positions, sequences)

    return Scenario(prepare, lambda r: r.put(), lambda r: r.check_seen())


def _remove(seq: int, begin: int, end: int | None, touched: bool) -> Scenario:
    return Scenario(
        _fill,
        lambda r: r.cache.remove(seq, begin, end),
        lambda r: r.model.remove(seq, begin, end),
        frozenset([seq]) if touched else frozenset(),
    )


WINDOW = Setup(window=2, max_sequences=4, capacity=40, layers=2)
SCENARIOS = {
    "start_forward": _start([3, 2, 4], [0, 1, 0]),
    "start_forward that evicts": Scenario(
        lambda r: r.forward(range(8), 0),
        lambda r: r.cache.start_forward(r.ctx, Batch([8, 0], [0, 1])),
        lambda r: _taken(r, [8, 0], [0, 1]),
        setup=WINDOW,
    ),
    "reserve": Scenario(_fill, lambda r: r.reserve(2), lambda r: None),
    "the first put": _put([0, 1, 2], [0, 0, 0], fill=False),
    "a put in a run": _put([3, 4], [0, 0], fill=True),
    "a scattered put": _put([4, 2, 3, 3], [0, 1, 0, 1], fill=True),
    "get": Scenario(_fill, lambda r: r.check_seen(), lambda r: None),
    "copy_prefix": Scenario(
        _fill, lambda r: r.cache.copy_prefix(0, 1, 2), lambda r: r.model.copy_prefix(0, 1, 2)
    ),
    "remove at the end": _remove(0, 1, None, touched=False),
    "remove in the middle of a run": _remove(0, 0, 1, touched=True),
    "remove in the middle, scattered": _remove(2, 1, 2, touched=True),
    "remove in the middle, in pieces": Scenario(
        lambda r: (r.forward(range(40), 0), r.forward(range(3), 1)),
        lambda r: r.cache.remove(0, 1, 2),
        lambda r: r.model.remove(0, 1, 2),
        frozenset([0]),
        Setup(max_sequences=4, capacity=48, layers=2),
    ),
    "defrag": Scenario(
        _scatter,
        lambda r: r.cache.defrag(),
        lambda r: None,
        frozenset([1, 2]),
    ),
}
every_scenario = pytest.mark.parametrize("scenario", list(SCENARIOS.values()), ids=list(SCENARIOS))


class FaultTests(CacheCase):
    @every_scenario
    @every_way_to_fail
    def test_a_failing_backend_leaves_the_cache_as_it_was_or_says_what_is_lost(
        self, backend: ml.Backend, scenario: Scenario, when: str
    ) -> None:
        failed = every_failure(backend, when, scenario.rig, scenario.act, scenario.check, self.fault_stride)
        assert failed or not scenario.touches

    def test_a_lost_sequence_says_so_wherever_it_is_used_and_comes_back(self, backend: ml.Backend) -> None:
        def check(r: Rig) -> None:
            uses: list[Callable[[], object]] = [
                lambda: r.cache.start_forward(r.ctx, Batch([3], [0])),
                lambda: r.cache.start_forward(r.ctx, Batch([3, 2], [0, 1])),
                lambda: r.cache.copy_prefix(0, SPARE, 1),
                lambda: r.cache.remove(0, 1),
                lambda: r.cache.remove(0, 0, 1),
            ]
            for use in uses:
                with pytest.raises(kvcache.SequenceLostError) as caught:
                    use()
                assert "sequence 0" in str(caught.value)
                r.check_figures()
            assert not r.cache.can_resume(0, 3)
            with pytest.raises(kvcache.OrderError):
                r.cache.get(r.ctx)  # the pass in progress read it, and has ended
            r.remove(0, 0)
            assert r.forward(range(3), 0)
            r.drain()

        self._lose(backend, check)

    def test_a_lost_sequence_is_whole_again_as_a_copy_of_another(self, backend: ml.Backend) -> None:
        def check(r: Rig) -> None:
            r.copy_prefix(1, 0, 2)
            r.extend(0)
            r.drain()

        self._lose(backend, check)

    @staticmethod
    def _lose(backend: ml.Backend, check: Callable[[Rig], None]) -> None:
        """Run ``check`` after every failure that loses sequence 0."""
        scenario, checked = SCENARIOS["remove in the middle of a run"], []

        def check_lost(r: Rig) -> None:
            r.model.lost = set(_lost(r))
            if r.model.lost:
                check(r)
                checked.append(r)

        every_failure(backend, "after the call", scenario.rig, scenario.act, check_lost)
        assert checked

    def test_a_config_that_fails_leaves_the_cache_unbound(self, backend: ml.Backend) -> None:
        class Broken:
            def new_context(self) -> ml.Context:
                return backend.new_context()

            def cache_config(self) -> ml.CacheConfig:
                raise InjectedError("cache_config: injected")

        cache = kvcache.CausalCache()
        with pytest.raises(InjectedError):
            cache.init(Broken(), ml.DType.F32, 2, 8, 8)  # type: ignore[arg-type]
        cache.set_config(ml.CacheConfig())
        cache.init(backend, ml.DType.F32, 2, 8, 8)
        assert cache.cells == 16


def _lost(r: Rig) -> Iterator[int]:
    """The sequences reported as lost."""
    for seq in range(SPARE):
        try:
            r.cache.copy_prefix(seq, SPARE, 0)
        except kvcache.SequenceLostError:
            yield seq
