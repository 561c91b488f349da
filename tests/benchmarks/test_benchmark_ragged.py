"""What benchmarks.ragged measures: its floors compute the same attention, and its counts are true."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ml
from benchmarks import ragged_hand as hand
from benchmarks.counted import CountingBackend, CountingRaggedBackend
from benchmarks.ragged import Ours
from ml.nn import attention

QUERY, TOKEN = ((hand.HEADS, hand.DIM), (hand.KV, hand.DIM))
TWO_LEVELS = hand.Case("two levels", (3, 3, 3, 3), ((9, 4), (6, 2)))
RAGGED = hand.Case("ragged", (7, 1, 12))


@pytest.fixture
def counting() -> Iterator[CountingBackend]:
    with CountingBackend() as backend:
        yield backend


def inputs(case: hand.Case) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    query, token = (random.standard_normal((case.sequences, *shape), np.float32) for shape in (QUERY, TOKEN))
    return query, token


def over_all(case: hand.Case, query: np.ndarray, token: np.ndarray, grown: int) -> np.ndarray:
    """Attention by its definition, one sequence at a time."""
    found = []
    for i, count in enumerate(case.own):
        own = case.tails[i, :, :count]
        before = [x[i // readers] for x, (_, readers) in zip(case.prefixes, case.levels, strict=True)]
        k = np.concatenate([*before, own, *[token[i][:, None]] * (grown + 1)], axis=1)
        q = query[i].reshape(hand.KV, hand.GROUP, hand.DIM)
        scores = np.exp(q @ k.swapaxes(1, 2) * hand.SCALE)
        found.append((scores / scores.sum(-1, keepdims=True) @ k).reshape(hand.HEADS, hand.DIM))
    return np.stack(found)


@pytest.mark.parametrize("case", [TWO_LEVELS, RAGGED], ids=lambda case: case.name)
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_floors_and_ours_attend_to_the_same(case: hand.Case, framework: str) -> None:
    ops, (query, token) = hand.ops_of(framework), inputs(case)
    kinds = (hand.Cascade, hand.Loop) if case.levels else (hand.Loop, hand.Padded)
    with ml.open_backend(framework, device="cpu") as backend:
        ways = [kind(ops, case, 1, query, token) for kind in kinds]
        for way in (*ways, Ours(ops, backend, case, 1).give(query, token)):
            for step in range(hand.GROWTH + 1):  # the last one after all are cut back
                way.start()
                wanted = over_all(case, query, token, step % hand.GROWTH)
                np.testing.assert_allclose(np.asarray(way.layer(0)), wanted, atol=1e-4)
                way.finish()


def test_counted_is_what_attention_is_given_and_what_was_gathered_for_it(counting: CountingBackend) -> None:
    case = hand.Case("one", (10,))
    ours = Ours(hand.Ops(), counting, case, 1).give(*inputs(case))
    ours.start()
    token = 8 * hand.KV * hand.DIM
    assert counting.count(ours.cache, lambda: ours.layer(0)).read == 11 * token
    key, value, _ = ours.cache.get(ours.ctx)

    def gathered() -> None:
        few = [x.rows(ours.ctx, [1, 4, 7]) for x in (key, value)]
        attention(ours.ctx, ours.query, *few)

    found = counting.count(ours.cache, gathered)
    assert (found.read, found.calls) == (6 * token, 3)


SHARED = [
    hand.Case(f"{readers} readers of {tokens}", (20,) * readers, ((tokens, readers),))
    for readers in (2, 8, 32)
    for tokens in (100, 500)
]
EIGHTS = hand.Case("32 readers of 200, by eights of 100 more", (20,) * 32, ((200, 32), (100, 8)))


@pytest.mark.parametrize("kind", [CountingBackend, CountingRaggedBackend])
@pytest.mark.parametrize("case", [*SHARED, EIGHTS], ids=lambda case: case.name)
def test_what_sequences_share_is_read_once(case: hand.Case, kind: type[CountingBackend]) -> None:
    """Within a tenth, and nothing of it is copied to be read. The kernel's is what its plan says."""
    query, token = inputs(case)
    with kind() as counting:
        ours = Ours(hand.Ops(), counting, case, 2).give(query, token)
        ours.start()
        ours.layer(0)
        found: list[Any] = []
        read = counting.count(ours.cache, lambda: found.append(ours.layer(1))).read
        np.testing.assert_allclose(found[0], over_all(case, query, token, 0), atol=1e-4)
    assert read <= 1.1 * case.distinct
