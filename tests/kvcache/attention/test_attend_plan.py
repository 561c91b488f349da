"""What a pass reads: the segments found in the cell table, and the calls of attention that they come to."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import ml
from backends.numpy.backend import NumpyBackend, NumpyContext
from kvcache import Batch, CausalCache, SlidingWindowCache
from kvcache.attention.calls import Call, plan_calls
from kvcache.attention.forward_pass import ForwardPass
from kvcache.attention.segments import Segment, find_segments, ragged_plan
from kvcache.attention.step_reads import step_reads
from kvcache.testing.traces import run_traces
from ml.ragged import RaggedPlan
from ml.testing.ragged import ragged_reference

WORTH = 4
"""Cells that cost as much to read as a call."""


class Driven:
    """A cache, and passes over it."""

    def __init__(
        self, backend: ml.Backend, cache: CausalCache | None = None, sequences: int = 4, tokens: int = 16
    ) -> None:
        self.ctx = backend.new_context()
        self.cache = cache or CausalCache()
        self.cache.init(backend, ml.DType.F32, sequences, tokens, 64)
        self.cache.set_config(ml.CacheConfig(call_bytes=32 * WORTH))  # K and V of a cell are 32 bytes

    def extend(self, lengths: dict[int, int], value: float = 1.0) -> None:
        """Further tokens of each sequence, in one batch."""
        pairs = [(self.cache.offset(seq) + i, seq) for seq, count in lengths.items() for i in range(count)]
        self.start([position for position, _ in pairs], [seq for _, seq in pairs])
        found = self.ctx.full((len(pairs), 1, 4), value, ml.DType.F32)
        self.cache.put(self.ctx, found, found)

    def start(self, positions: Sequence[int], sequences: Sequence[int]) -> None:
        self.cache.start_forward(self.ctx, Batch(positions, sequences))

    @property
    def forward(self) -> ForwardPass:
        found = self.cache.pass_under_way()
        assert found is not None
        return found

    def segments(self, worth: int = WORTH) -> list[Segment]:
        plan = self.forward.reading
        return find_segments(plan.table, plan.groups, plan.lower, plan.lifted, worth)

    def levels(self, worth: int = WORTH) -> list[list[Call]]:
        plan = self.forward.reading
        return plan_calls(self.segments(worth), plan.tokens, plan.table, plan.config, worth)[0]

    def attend(self) -> np.ndarray:
        return self.cache.attend(
            self.ctx, self.ctx.zeros((self.forward.tokens, 1, 4), ml.DType.F32), 1.0
        ).to_numpy()


def shown(segments: Sequence[Segment]) -> list[tuple[int, list[int]]]:
    """(length, readers) of each segment."""
    return sorted((segment.length, segment.queries.tolist()) for segment in segments)


def read_by(plan: ml.RaggedPlan) -> dict[int, list[int]]:
    """The cells that each query reads."""
    found: dict[int, list[int]] = {}
    for number, (_, _, _, first, stop) in enumerate(plan.segments.tolist()):
        for query, begin, end in plan.readers[first:stop].tolist():
            found.setdefault(query, []).extend(plan.rows(number)[begin:end].tolist())
    return {query: sorted(cells) for query, cells in found.items()}


# What a pass costs: its segments, with who reads each, and its calls of attention, level by level.

Steps = list[dict[int, int] | tuple[int, int, int]]
"""Further tokens of each sequence in one batch, or the arguments of copy_prefix."""
SEGMENTS: dict[str, tuple[Steps, int, list[tuple[int, list[int]]]]] = {
    "a shared prefix is one, with all its readers": (
        [{0: 10}, (0, 1, 10), (0, 2, 10), {0: 1, 1: 1, 2: 1}],
        *(WORTH, [(1, [0]), (1, [1]), (1, [2]), (10, [0, 1, 2])]),
    ),
    "prefixes of several levels stand once each": (
        [{0: 6}, (0, 1, 6), {0: 5, 1: 4}, (0, 2, 11), (1, 3, 10), {0: 1, 1: 1, 2: 1, 3: 1}],
        *(WORTH, [*((1, [i]) for i in range(4)), (4, [1, 3]), (5, [0, 2]), (6, [0, 1, 2, 3])]),
    ),
    "a short share is read with what is a sequence's own": (
        [{0: 3}, (0, 1, 3), {0: 2, 1: 2}], 8, [(5, [0, 1]), (5, [2, 3])],
    ),
    "a share that is worth a call is read apart": (
        [{0: 3}, (0, 1, 3), {0: 2, 1: 2}], 7, [(2, [0, 1]), (2, [2, 3]), (3, [0, 1, 2, 3])],
    ),
    "windows that lost different heads share what both still see": (
        [{0: 8}, (0, 1, 8), {1: 2}, {0: 1, 1: 1}], WORTH, [(2, [0]), (3, [1]), (6, [0, 1])],
    ),
}  # fmt: skip
CALLS: dict[str, tuple[Steps, int, list[list[tuple[int, int, int, int]]]]] = {
    "sequences that grow from their homes are one": (
        [{0: 5, 1: 3, 2: 6, 3: 4}, {0: 1, 1: 1, 2: 1, 3: 1}], WORTH, [[(4, 7, 0, 16)]],
    ),
    "a long one beside short ones is cut to their length": (
        [{0: 2, 1: 2, 2: 15, 3: 2}, {0: 1, 1: 1, 2: 1, 3: 1}], WORTH, [[(4, 3, 0, 16)], [(1, 13, 35, 13)]],
    ),
    "runs that lie two by two are two": (
        [dict.fromkeys((0, 1, 3, 7), 1)] * 2, 100, [[(2, 2, 0, 16), (2, 2, 48, 64)]],
    ),
}  # fmt: skip


def driven_by(backend: ml.Backend, steps: Steps, name: str, sequences: int = 4) -> Driven:
    driven = Driven(backend, SlidingWindowCache(7) if "window" in name else None, sequences)
    for step in steps:
        driven.extend(step) if isinstance(step, dict) else driven.cache.copy_prefix(*step)
    return driven


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("name", SEGMENTS)
def test_segments_of_a_pass(backend: ml.Backend, name: str, pinned: bool) -> None:
    """With or without a snapshot in the cache, which reads nothing."""
    steps, worth, expected = SEGMENTS[name]
    driven = driven_by(backend, steps[:-1], name)
    kept = driven.cache.snapshot(0) if pinned else None
    driven.extend(steps[-1])
    assert shown(driven.segments(worth)) == expected
    for level in driven.levels(worth):
        queries = np.arange(driven.forward.tokens)
        assert sorted(np.concatenate([queries[call.tokens] for call in level])) == [*queries]
    np.testing.assert_allclose(driven.attend(), 1)
    del kept


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_a_pass(backend: ml.Backend, name: str) -> None:
    steps, worth, expected = CALLS[name]
    driven = driven_by(backend, steps, name, sequences=8 if worth == 100 else 4)
    levels = driven.levels(worth)
    assert [
        [(call.batch, call.length, call.start, call.step) for call in level] for level in levels
    ] == expected
    assert all(call.cells is None for level in levels for call in level)
    np.testing.assert_allclose(driven.attend(), 1)


def test_a_prompt_is_one_call_that_needs_no_mask_of_its_own(backend: ml.Backend) -> None:
    driven = Driven(backend)
    driven.extend({0: 5})
    driven.extend({0: 3})
    ((call,),) = driven.levels()
    assert (call.length, call.seen) == (8, ml.CAUSAL)
    driven.extend({0: 1})
    assert driven.levels()[0][0].seen is None


def test_a_step_that_only_adds_a_token_each_goes_on_with_the_segments_of_the_step_before(
    backend: ml.Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = Driven(backend)
    driven.extend({0: 6})
    driven.cache.copy_prefix(0, 1, 6)
    for _ in range(2):
        driven.extend({0: 1, 1: 1})
        driven.attend()

    refused = Mock(side_effect=AssertionError("found anew"))
    with monkeypatch.context() as patched:
        patched.setattr("kvcache.attention.segments.find_segments", refused)
        for step in range(3):
            driven.extend({0: 1, 1: 1})
            plan, anew = driven.forward.reading.kernel(WORTH), ragged_plan(driven.segments(), 2)
            assert plan.pack().tolist() == anew.pack().tolist()
            assert shown(driven.forward.reading.segments(WORTH)) == [
                (3 + step, [0]),
                (3 + step, [1]),
                (6, [0, 1]),
            ]
            if step != 1:
                driven.attend()
    driven.extend({1: 1})  # a pass that asks for nothing
    driven.extend({0: 1, 1: 1})
    assert shown(driven.forward.reading.segments(WORTH)) == [(6, [0]), (6, [0, 1]), (7, [1])]
    driven.cache.remove(1, 0)
    driven.extend({0: 1})
    assert shown(driven.forward.reading.segments(WORTH)) == [(13, [0])]


@pytest.mark.parametrize("seed", range(12))
def test_a_plan_that_grew_reads_what_one_made_anew_does(backend: ml.Backend, seed: int) -> None:
    """Sequences that decode together, run into one another, are forked, taken back and evicted."""
    rnd = random.Random(seed)
    driven = Driven(backend, rnd.choice([CausalCache(), SlidingWindowCache(5)]), sequences=3, tokens=40)
    kept = None
    for _ in range(60):
        op = rnd.choice(["step"] * 8 + ["fork", "remove", "pin", "defrag", "alone", "look", "unasked"])
        one, other = rnd.sample(range(3), 2)
        if driven.cache.free_cells < 4:
            driven.cache.remove(one, 0)
        elif op == "fork":
            driven.cache.copy_prefix(one, other, rnd.randrange(driven.cache.offset(one) + 1))
        elif op == "remove":
            driven.cache.remove(one, rnd.randrange(driven.cache.offset(one) + 1))
        elif op == "pin":
            kept = (
                driven.cache.snapshot(one) if driven.cache.can_resume(one, driven.cache.offset(one)) else kept
            )
        elif op == "defrag":
            driven.cache.defrag()
        elif op == "look" and driven.cache.offset(one):
            batch = Batch([driven.cache.offset(one)], [one])
            driven.cache.start_forward(driven.ctx, batch, read_only=True)
        else:
            driven.extend({one: 1} if op == "alone" else dict.fromkeys(range(3), 1))
        if op in ("step", "alone") and driven.cache.pass_under_way() is not None:
            plan = driven.forward.reading.kernel(WORTH)
            assert read_by(plan) == read_by(ragged_plan(driven.segments(), driven.forward.tokens))


def test_after_a_pass_of_several_tokens_of_a_sequence_segments_are_found_anew(backend: ml.Backend) -> None:
    driven = Driven(backend, sequences=1)
    for positions in (range(4), range(10, 14), (5, 14), (15,), (16,)):
        driven.start(positions, [0] * len(positions))
        driven.cache.put(driven.ctx, *[driven.ctx.full((len(positions), 1, 4), 1.0, ml.DType.F32)] * 2)
        np.testing.assert_allclose(driven.attend(), 1)


def test_the_report_says_what_is_read_once_for_several(backend: ml.Backend) -> None:
    driven = Driven(backend)
    driven.extend({0: 12})
    for seq in (1, 2):
        driven.cache.copy_prefix(0, seq, 12)
    driven.extend({0: 1, 1: 1, 2: 1})
    plan = driven.forward.reading
    reads = step_reads(plan.table, plan.config, None, WORTH)
    assert (reads.cells, reads.shared, reads.saved) == (15, 12, 24)


# What others hold.


@pytest.mark.parametrize("name", ["numpy", "torch", "mlx"])
@pytest.mark.parametrize("padding", [1, 4])
@pytest.mark.parametrize("call_bytes", [1, 1 << 19])
def test_nan_of_one_sequence_reaches_only_its_own_rows(name: str, padding: int, call_bytes: int) -> None:
    config = ml.CacheConfig(cache_padding=padding, call_bytes=call_bytes)
    cache = CausalCache()
    with ml.open_backend(name) as backend:
        driven = Driven(backend, cache)
        cache.set_config(config)
        driven.extend({0: 3, 2: 5})
        cache.copy_prefix(0, 3, 3)
        driven.extend({1: 4}, np.nan)
        driven.start([3, 4, 5, 3], [0, 1, 2, 3])
        row = np.ones((4, 1, 4), np.float32)
        row[1] = np.nan
        driven.cache.put(driven.ctx, driven.ctx.from_numpy(row), driven.ctx.from_numpy(row))
        found = driven.attend()
        assert np.isnan(found[1]).all()
        np.testing.assert_allclose(found[[0, 2, 3]], 1, rtol=1e-6)


def test_padding_between_sequences_is_blanked_and_no_cell_of_another(backend: ml.Backend) -> None:
    """The padding of a call is not in the order of its cells."""
    driven = Driven(backend, tokens=6)
    driven.cache.set_config(ml.CacheConfig(cache_padding=2))
    driven.extend(dict.fromkeys(range(4), 6))
    for seq in range(4):
        driven.cache.remove(seq, 0)
    driven.extend({0: 3, 3: 3})
    driven.extend({0: 2, 3: 2, 1: 1})
    np.testing.assert_allclose(driven.attend(), 1)


# A kernel for ragged batches.


class RaggedNumpy(NumpyBackend):
    """NumPy with such a kernel, straight from its definition; counts its calls."""

    calls = 0

    def ragged_attention(
        self, ctx: NumpyContext, query: Any, key: Any, value: Any, plan: ml.RaggedPlan, scale: float,
        sinks: Any = None, formats: Any = None,
    ) -> Any:  # fmt: skip
        if formats is not None:
            return None
        self.calls += 1
        arrays = [x.to_numpy().astype(np.float64) for x in (query, key, value)]
        shown = None if sinks is None else sinks.to_numpy().astype(np.float64)
        found = ragged_reference(*arrays, plan, scale, shown)
        return ctx.from_numpy(found, query.dtype)


def test_random_traces_agree_by_a_kernel_for_ragged_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.attention.forward_pass.TOGETHER", 1)
    with RaggedNumpy() as backend:
        assert run_traces(backend, range(60)) == []
        assert backend.calls > 100


def test_with_a_kernel_a_layer_is_one_call_however_many_sequences() -> None:
    with RaggedNumpy() as backend:
        driven = Driven(backend, sequences=32)
        driven.extend({0: 8})
        for seq in range(1, 32):
            driven.cache.copy_prefix(0, seq, 8)
        driven.extend(dict.fromkeys(range(32), 1))
        driven.attend()
        assert backend.calls == 1
        plan = driven.forward.reading.kernel(WORTH)
        assert sum(length for _, _, length, _, _ in plan.segments.tolist()) == 8 + 32


def test_a_plan_names_every_query_and_packs_into_one_array() -> None:
    segments = [
        Segment(3, 2, np.array([0])),
        Segment(np.array([9, 1]), 2, np.array([0, 1])),
        Segment(np.array([4, 0, 7]), 3, np.array([1])),
        Segment(np.array([6]), 1, np.array([0])),
    ]
    plan = ragged_plan(segments, 2)
    assert plan.segments.tolist() == [[0, 3, 2, 0, 1], [1, 0, 2, 1, 3], [1, 2, 3, 3, 4], [1, 5, 1, 4, 5]]
    assert plan.readers.tolist() == [[0, 0, 2], [0, 0, 2], [1, 0, 2], [1, 0, 3], [0, 0, 1]]
    assert (plan.index.tolist(), plan.rows(2).tolist()) == ([9, 1, 4, 0, 7, 6], [4, 0, 7])
    packed = plan.pack()
    tokens, count, readers, index, *places = packed[:8].tolist()
    assert (tokens, count, readers, index) == (2, 4, 5, 6)
    assert packed[places[1] : places[1] + 6].tolist() == [9, 1, 4, 0, 7, 6]
    with pytest.raises(ml.ShapeError, match="each query must have at least one"):
        ragged_plan(segments[:1], 2)
    with pytest.raises(ml.ShapeError, match="there must be no others"):
        RaggedPlan(1, plan.segments[:1], np.array([[-1, 0, 2]]), plan.index)


@pytest.mark.parametrize("name", ["numpy", "torch", "mlx"])
def test_cells_that_two_sequences_read_apart_stay_as_they_are_beside_free_ones(name: str) -> None:
    """The free cells behind what two sequences share are blanked for both; theirs lie between others."""
    pytest.importorskip({"numpy": "numpy", "torch": "torch", "mlx": "mlx.core"}[name])
    with ml.open_backend(name) as backend, backend.new_context() as ctx:
        cache = CausalCache()
        cache.set_config(ml.CacheConfig(cache_padding=8))
        cache.init(backend, (ml.DType.F32, ml.DType.F16), 3, 8, 16)
        new = ctx.full((16, 1, 4), 1.0, ml.DType.F32)
        cache.start_forward(ctx, Batch([*range(8)] * 2, [0] * 8 + [1] * 8))
        cache.put(ctx, new, new)
        cache.remove(0, 1)
        cache.remove(1, 4)
        cache.copy_prefix(1, 2, 4)
        cache.start_forward(ctx, Batch([0, 3, 3], [0, 1, 2]), read_only=True)
        for _ in range(2):
            found = cache.attend(ctx, ctx.zeros((3, 1, 4), ml.DType.F32), 1.0).to_numpy()
            np.testing.assert_array_equal(found, 1.0)
