"""Sampling: what may be drawn, how often, and the same again with the same seed; on the host and by Tensors.

The reference is written here in float64, row by row, after the definitions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import ml
from kvcache_engine.errors import RunnerError
from kvcache_engine.sampling import Choice, Sampler
from ml import nn
from ml.selection import largest

from ..rigs.each_backend import host_and_tensors

Draw = Callable[[np.ndarray, nn.Draws], np.ndarray]
ROUNDING = 3e-6
"""How far from an edge of the cumulative probability F32 may take the other side."""


def by_tensors(backend: ml.Backend) -> Draw:
    def draw(logits: np.ndarray, draws: nn.Draws) -> np.ndarray:
        with backend.new_context() as ctx:
            sampler = nn.BatchSampler(ctx, draws, logits.shape[1])
            return sampler(ctx, ctx.from_numpy(logits, ml.DType.F32)).to_numpy()

    return draw


draw = host_and_tensors(nn.sample_on_host, by_tensors)


def distribution(
    logits: np.ndarray, temperature: float, k: int, p: float, least: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens in the order in which they are drawn from, and their probabilities."""
    values = logits.astype(np.float64) / temperature
    cut = 0 < k < len(values) or p < 1 or least > 0
    order = np.argsort(-values, kind="stable") if cut else np.arange(len(values))
    order = order[: k or None]
    weights = np.exp(values[order] - values.max())
    weights /= weights.sum()
    if p < 1:
        count = next((i for i, edge in enumerate(np.cumsum(weights)) if edge >= p), len(weights) - 1) + 1
        order, weights = order[:count], weights[:count] / weights[:count].sum()
    kept = weights >= least * weights.max()
    return order[kept], weights[kept] / weights[kept].sum()


def shares(
    logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Any:
    """(vocabulary,) in float64, by the definitions."""
    found = np.zeros(len(logits))
    order, weights = distribution(logits, temperature, top_k, top_p, min_p)
    found[order] = weights
    return found


def check_counts(counts: np.ndarray, expected: np.ndarray) -> None:
    """Chi-square, what is rare taken together; nothing comes that cannot."""
    total = counts.sum()
    assert not counts[expected == 0].any()
    often = expected * total >= 5
    observed = np.append(counts[often], counts[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum()) * total
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic, freedom = ((observed - wanted) ** 2 / wanted).sum(), len(wanted) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5  # mean and four standard deviations


Row = tuple[float, int, float, float] | tuple[float, int, float, float, float]
"""Temperature, top-k, top-p, ``uniform``, and min-p where there is one."""


def settings_of(*rows: Row) -> nn.Draws:
    return nn.Draws(*np.array(rows, np.float64).T)


def check_row(token: int, logits: np.ndarray, row: tuple[float, int, float, float, float]) -> None:
    """The reference's token, or where ``uniform`` or p is within rounding of an edge, one beside it."""
    temperature, k, p, uniform, least = row
    if temperature == 0:
        assert token == int(np.argmax(logits))
        return
    found: list[int] = []
    shares = {p, *(min(1.0, p + d) for d in (-ROUNDING, ROUNDING) if p < 1)}
    floors = {least, *(least * (1 + d) for d in (-ROUNDING, ROUNDING))}
    for share, floor in itertools.product(shares, floors):
        order, weights = distribution(logits, temperature, k, share, floor if floor <= 1 else least)
        edges = np.cumsum(weights)
        low, high = (
            int(np.searchsorted(edges, np.clip(uniform + d, 1e-30, edges[-1]))) for d in (-ROUNDING, ROUNDING)
        )
        found += [int(order[at]) for at in range(low, high + 1) if weights[at] > 0]
    assert token in found


ROW = st.tuples(
    st.sampled_from([0.0, 0.1, 0.7, 1.0, 5.0]),
    st.sampled_from([0, 1, 2, 7, 40, 1000]),
    st.sampled_from([1.0, 0.05, 0.5, 0.95]),
    st.integers(1, 1 << 24).map(lambda i: i * 2.0**-24),
    st.sampled_from([0.0, 0.0, 1e-3, 0.2, 1.0]),
)


@given(
    data=st.data(),
    vocabulary=st.sampled_from([1, 2, 5, 33, 100, 513]),
    rows=st.lists(ROW, min_size=1, max_size=6),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_row_of_a_mixed_batch_is_what_the_reference_says(
    draw: Draw, data: st.DataObject, vocabulary: int, rows: list[tuple[float, int, float, float, float]]
) -> None:
    elements = st.one_of(st.floats(-20, 20, width=32), st.sampled_from([0.0, 3.0, float("-inf")]))
    logits = data.draw(hnp.arrays(np.float32, (len(rows), vocabulary), elements=elements))
    logits[:, vocabulary // 2] = 1.0  # something can be drawn
    for token, values, row in zip(draw(logits, settings_of(*rows)), logits, rows, strict=True):
        check_row(int(token), values, row)


def test_a_row_does_not_depend_on_the_others(draw: Draw) -> None:
    random = np.random.default_rng(4)
    logits = random.normal(0, 3, (24, 300)).astype(np.float32)
    rows = [
        ((0.0, 0.8, 1.0)[i % 3], (0, 5, 50)[i // 3 % 3], (1.0, 0.9)[i % 2], u)
        for i, u in enumerate(random.random(24))
    ]
    together = draw(logits, settings_of(*rows))
    assert together.tolist() == [int(draw(logits[i : i + 1], settings_of(rows[i]))[0]) for i in range(24)]


@pytest.mark.parametrize(
    ("k", "p", "least"), [(0, 1.0, 0.0), (20, 1.0, 0.0), (0, 0.8, 0.0), (50, 0.9, 0.0), (0, 1.0, 0.05)]
)
def test_frequencies_follow_the_probabilities(draw: Draw, k: int, p: float, least: float) -> None:
    """Over 10000 draws of fixed seeds."""
    logits = np.random.default_rng(1).normal(0, 2, 200).astype(np.float32)
    samplers = [Sampler(0.9, k, p, seed) for seed in range(20)]
    uniform = [sampler.uniform(i) for sampler in samplers for i in range(500)]
    tokens = draw(np.repeat(logits[None], 10000, 0), settings_of(*((0.9, k, p, u, least) for u in uniform)))
    check_counts(np.bincount(tokens, minlength=200), shares(logits, 0.9, k, p, least))


def test_what_is_rare_in_a_large_vocabulary_is_drawn_as_often_as_it_is_likely(draw: Draw) -> None:
    """Half of the probability lies on one token, the other half evenly on 100000."""
    logits = np.full((1, 100_001), -np.log(100_000), np.float32)
    logits[0, 500] = 0
    uniform = np.linspace(0.05, 1, 20)
    tokens = [int(draw(logits, settings_of((1.0, 0, 1.0, u)))[0]) for u in uniform]
    edges = np.cumsum(distribution(logits[0], 1.0, 0, 1.0)[1])
    np.testing.assert_allclose(tokens, np.searchsorted(edges, uniform), atol=2)


def test_masked_tokens_are_never_drawn_and_a_tiny_temperature_is_nearly_greedy(draw: Draw) -> None:
    masked = np.array([[-np.inf, 1, -np.inf, 0, -np.inf]], np.float32)
    for u in (2.0**-24, 0.3, 0.9, 1.0):
        assert draw(masked, settings_of((2.0, 0, 1.0, u)))[0] in {1, 3}
        assert draw(masked, settings_of((2.0, 4, 0.99, u)))[0] in {1, 3}
        for k in (0, 2):
            assert draw(np.array([[0, 1, 0.5]], np.float32), settings_of((1e-300, k, 1.0, u)))[0] == 1


@given(
    hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 3), st.sampled_from([1, 9, 4096])),
        elements=st.integers(-3, 3) | st.just(np.nan),
    ),
    st.integers(1, 64),
)
@settings(deadline=None, max_examples=40)
def test_the_largest_are_in_descending_order_lower_places_first(x: np.ndarray, k: int) -> None:
    k = min(k, x.shape[1])
    for row, found in zip(x, largest(x, k).tolist(), strict=True):
        ranked = sorted(
            range(len(row)), key=lambda i: (not np.isnan(row[i]), -row[i] if row[i] == row[i] else 0, i)
        )
        assert [x for x in found if row[x] == row[x]] == [x for x in ranked[:k] if row[x] == row[x]]


def test_a_token_half_as_likely_as_the_likeliest_is_kept_by_half(draw: Draw) -> None:
    """Known by hand: 0.5, 0.25, 0.2, 0.05; after top-p, which does not change what is likeliest."""
    logits = np.log(np.array([[0.2, 0.5, 0.05, 0.25]], np.float32))
    for least, p, kept in ((0.49, 1.0, {1, 3}), (0.3, 1.0, {0, 1, 3}), (0.3, 0.6, {1, 3}), (1.0, 1.0, {1})):
        uniform = np.linspace(0.01, 1, 40)
        rows = np.repeat(logits, 40, 0)
        assert set(draw(rows, settings_of(*((1.0, 0, p, u, least) for u in uniform))).tolist()) == kept


# Seeds.


def draws(sampler: Sampler, indices: Any = range(200)) -> list[float]:
    return [sampler.uniform(i) for i in indices]


def test_streams_of_a_seed_draw_their_own_and_repeat() -> None:
    first, second, again = (Sampler(1.0, seed=9, stream=stream) for stream in (0, 1, 0))
    assert draws(first) == draws(again, reversed(range(200)))[::-1]
    assert len({*draws(first), *draws(second), *draws(Sampler(1.0, seed=10))}) > 595
    assert all(0 < u <= 1 and np.float32(u) == u for u in draws(first))
    many = np.sort(draws(first, range(4000)))
    assert abs(many - np.linspace(0, 1, 4000)).max() < 1.6 / 4000**0.5  # Kolmogorov-Smirnov, 1 %


def test_draws_of_a_seed_are_the_same_in_every_release() -> None:
    assert draws(Sampler(1.0, seed=1234, stream=2), (0, 1, 64, 1000)) == [
        0.45782196521759033, 0.32387781143188477, 0.02330946922302246, 0.8998642563819885,
    ]  # fmt: skip


def test_without_a_seed_one_is_taken_and_told() -> None:
    sampler = Sampler(1.0)
    assert draws(sampler) == draws(Sampler(1.0, seed=sampler.seed))


# A pass.


@pytest.mark.parametrize("device", ["cpu", "elsewhere"])
def test_logits_that_overflowed_are_an_error_of_their_row_alone(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = np.array([[0, np.nan, 1], [0, 2, 1], [np.inf, 0, 0], [-np.inf] * 3], np.float32)
    with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
        monkeypatch.setattr(type(backend), "devices", (ml.DeviceInfo(device, device, ""),))
        for temperature in (0.0, 1e-9):
            choice = Choice(ctx, [(Sampler(temperature, seed=3), 0)] * 4, 3)
            chosen = choice(ctx, ctx.from_numpy(logits))
            assert chosen.token(1) == 1
            for row in (0, 2, 3):
                with pytest.raises(RunnerError, match="overflowed"):
                    chosen.token(row)


def test_draws_for_other_logits_are_refused() -> None:
    with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
        sampler = nn.BatchSampler(ctx, settings_of((1.0, 0, 1.0, 0.5)), 4)
        for shape in ((2, 4), (1, 5), (4,), (0, 4)):
            with pytest.raises(ml.ShapeError, match="sample"):
                sampler(ctx, ctx.zeros(shape, ml.DType.F32))
