"""Sampler: what may be drawn, how often, and the same again with the same seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvcache.runner.errors import RequestError, RunnerError
from kvcache.runner.sampling import Sampler

LOGITS = hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(-20, 20, width=32))
TEMPERATURES = st.floats(0.1, 5)


def softmax(values: np.ndarray) -> np.ndarray:
    weights = np.exp(values - values.max())
    return weights / weights.sum()


@given(LOGITS)
def test_greedy_takes_the_first_of_the_largest(logits: np.ndarray) -> None:
    assert Sampler()(logits) == int(np.argmax(logits))
    assert Sampler()(np.zeros(5, np.float32)) == 0


@given(LOGITS, TEMPERATURES)
def test_without_cuts_the_distribution_is_the_softmax(logits: np.ndarray, temperature: float) -> None:
    tokens, probabilities = Sampler(temperature).distribution(logits)
    assert sorted(tokens) == list(range(len(logits)))
    expected = softmax(logits.astype(np.float64) / temperature)
    np.testing.assert_allclose(probabilities, expected[tokens], atol=1e-12)


@given(LOGITS, TEMPERATURES, st.integers(1, 50))
def test_top_k_keeps_the_k_largest_lower_ids_first(logits: np.ndarray, temperature: float, k: int) -> None:
    tokens, probabilities = Sampler(temperature, top_k=k).distribution(logits)
    assert list(tokens) == list(np.argsort(-logits, kind="stable")[:k])
    assert probabilities.sum() == pytest.approx(1)


@given(LOGITS, TEMPERATURES, st.floats(0.01, 1))
def test_top_p_keeps_the_smallest_set_that_reaches_p(
    logits: np.ndarray, temperature: float, p: float
) -> None:
    tokens, probabilities = Sampler(temperature, top_p=p).distribution(logits)
    full = softmax(logits.astype(np.float64) / temperature)
    order = np.argsort(-logits, kind="stable")
    assert list(tokens) == list(order[: len(tokens)])
    assert full[tokens].sum() >= p - 1e-9
    assert full[tokens[:-1]].sum() < p + 1e-9
    assert probabilities.sum() == pytest.approx(1)


@given(LOGITS, TEMPERATURES, st.integers(0, 5), st.floats(0.1, 1), st.integers(0, 2**32))
def test_draws_come_from_the_distribution_and_repeat_with_the_seed(
    logits: np.ndarray, temperature: float, k: int, p: float, seed: int
) -> None:
    one, other = (Sampler(temperature, k, p, seed) for _ in range(2))
    allowed = set(one.distribution(logits)[0].tolist())
    draws = [one(logits) for _ in range(5)]
    assert set(draws) <= allowed
    assert draws == [other(logits) for _ in range(5)]


def test_frequencies_follow_the_probabilities() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    sampler = Sampler(1.0, seed=3)
    counts = np.bincount([sampler(logits) for _ in range(4000)], minlength=4)
    np.testing.assert_allclose(counts / 4000, [0.5, 0.3, 0.15, 0.05], atol=0.03)


def test_masked_tokens_are_never_drawn() -> None:
    logits = np.array([-np.inf, 1.0, -np.inf, 0.0], np.float32)
    sampler = Sampler(2.0, seed=0)
    assert {sampler(logits) for _ in range(50)} == {1, 3}


def test_a_tiny_temperature_is_nearly_greedy() -> None:
    assert Sampler(1e-300, seed=1)(np.array([0.0, 1.0, 0.5], np.float32)) == 1


def test_streams_of_a_seed_draw_their_own_and_repeat() -> None:
    logits = np.zeros(1000, np.float32)
    first, second, again = (Sampler(1.0, seed=9, stream=stream) for stream in (0, 1, 0))
    draws = [first(logits) for _ in range(4)]
    assert draws != [second(logits) for _ in range(4)]
    assert draws == [again(logits) for _ in range(4)]


def test_without_a_seed_one_is_taken_and_told() -> None:
    sampler = Sampler(1.0)
    logits = np.zeros(1000, np.float32)
    assert [sampler(logits) for _ in range(4)] == [
        s(logits) for s in [Sampler(1.0, seed=sampler.seed)] for _ in range(4)
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"seed": -3}, "seed=-3"),
    ],
)
def test_settings_outside_their_range(settings: dict[str, float], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Sampler(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_overflowed_are_an_error(bad: float, temperature: float) -> None:
    with pytest.raises(RunnerError, match="overflowed"):
        Sampler(temperature)(np.array([0.0, bad, 1.0], np.float32))
    with pytest.raises(RunnerError):
        Sampler(temperature)(np.full(3, -np.inf, np.float32))
