"""What a pass that failed has left is shared with nobody and kept nowhere."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest

import ml
from kvcache import (
    Batch,
    CausalCache,
    InvalidBatchError,
    OrderError,
    PrefixCache,
    PrefixOptions,
    RecurrentCache,
    Session,
    SlidingWindowCache,
)
from kvcache.stores.memory import MemoryStore
from kvcache.testing.rigs.protocol import InjectedError

LAYERS = 2
PROMPT = list(range(20))
IDENTITY = {"model": "m"}


class Model:
    """Puts as many layers as it is told, and attends in each."""

    def __init__(self, backend: ml.Backend, cache: CausalCache | SlidingWindowCache | RecurrentCache) -> None:
        self.cache, self.ctx = cache, backend.new_context()
        self.attention: set[int] = set()
        cache.init(backend, ml.DType.F32, 4, 64, 64)

    def evaluate(self, session: Session, tokens: Iterable[int], layers: int = LAYERS, late: int = 0) -> None:
        begin, count = session.cached + late, len(list(tokens)) - late
        self.start([(at, session.seq) for at in range(begin, begin + count)], layers)

    def start(self, tokens: list[tuple[int, int]], layers: int = LAYERS) -> None:
        count, sequences = len(tokens), len({seq for _, seq in tokens})
        self.cache.start_forward(self.ctx, Batch(*zip(*tokens, strict=True)))
        for layer in range(layers):
            self.cache.set_layer(layer)
            if isinstance(self.cache, RecurrentCache) and layer not in self.attention:
                self.cache.set_conv_state(self.ctx, layer, self.ctx.full((sequences, 2), 1, ml.DType.F32))
                continue
            new = self.ctx.full((count, 1, 4), 1, ml.DType.F32)
            self.cache.put(self.ctx, new, new)
            self.cache.attend(self.ctx, new, 1.0)


@pytest.fixture(params=["causal", "window", "recurrent", "hybrid"])
def model(request: pytest.FixtureRequest, backend: ml.Backend) -> Model:
    kinds = {
        "causal": CausalCache,
        "window": lambda: SlidingWindowCache(30),
        "recurrent": lambda: RecurrentCache((2,), ()),
        "hybrid": lambda: RecurrentCache((2,), ()),
    }
    model = Model(backend, kinds[request.param]())
    model.attention |= {1} if request.param == "hybrid" else set()
    return model


@pytest.fixture
def prefix(model: Model) -> Iterator[PrefixCache]:
    """Knows the layers: one conversation went well."""
    store = MemoryStore()
    options = PrefixOptions(interval=4)
    with PrefixCache(model.cache, tiers=[store], identity=IDENTITY, block_size=1, options=options) as prefix:
        with prefix.begin([100, 101]) as session:
            model.evaluate(session, session.remaining)
        yield prefix


@pytest.mark.parametrize("between", [False, True], ids=["closed at once", "another's pass between"])
@pytest.mark.parametrize("layers", range(LAYERS))
def test_a_session_closed_after_a_failed_pass_leaves_what_came_before_it(
    prefix: PrefixCache, model: Model, layers: int, between: bool
) -> None:
    with prefix.begin(PROMPT[:8]) as session:
        model.evaluate(session, session.remaining)
    for again in (False, True):
        session = prefix.begin(PROMPT)
        assert session.cached == 8
        model.evaluate(session, session.remaining, layers)
        if between:
            with prefix.begin([7, again]) as other:
                model.evaluate(other, other.remaining)
        session.close()
        prefix.flush()
        if again:
            prefix.clear()
    with prefix.begin([*PROMPT, 0]) as session:  # from the store
        assert session.cached == 8
        model.evaluate(session, session.remaining)
    with prefix.begin([*PROMPT, 0, 0]) as session:
        assert session.cached == len(PROMPT) + 1


def test_what_an_open_session_has_not_finished_is_not_shared(prefix: PrefixCache, model: Model) -> None:
    failed = prefix.begin(PROMPT)
    model.evaluate(failed, failed.remaining, layers=1)
    with prefix.begin(PROMPT) as other:
        assert other.cached == 0
    failed.close()


def test_a_session_goes_on_after_a_failed_pass_when_its_tokens_are_removed(
    prefix: PrefixCache, model: Model
) -> None:
    with prefix.begin(PROMPT) as session:
        model.evaluate(session, session.remaining, layers=1)
        assert session.rewind(len(PROMPT)) == 0
        assert session.remaining == PROMPT
        model.evaluate(session, session.remaining)
    with prefix.begin([*PROMPT, 0]) as session:
        assert session.cached == len(PROMPT)


@pytest.mark.parametrize("how", ["rewind", "close", "close of all"])
def test_several_sessions_of_a_batch_that_failed_where_a_snapshot_was_due_go_on(
    prefix: PrefixCache, model: Model, how: str
) -> None:
    prompts = [[*range(at, at + 8)] for at in (20, 40)]
    sessions = [prefix.begin(prompt) for prompt in prompts]
    for begin, layers in ((0, LAYERS), (2, 1)):
        model.start([(at, session.seq) for session in sessions for at in (begin, begin + 1)], layers)
    if how == "close of all":
        prefix.close()
        assert prefix.sessions == ()
        return
    for session, prompt in zip(sessions, prompts, strict=True):
        if how == "rewind":
            reached = session.rewind(2)
            assert reached in (0, 2)
            session.extend(prompt[2:])
            model.start([(at, session.seq) for at in range(reached, 8)])
        session.close()
        with prefix.begin([*prompt, 0]) as again:
            assert (again.cached == 8) is (how == "rewind")


def test_a_session_that_cannot_be_closed_keeps_no_other_from_the_store(
    backend: ml.Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, store = Model(backend, CausalCache()), MemoryStore()
    prefix = PrefixCache(model.cache, tiers=[store], identity=IDENTITY, block_size=1)
    failing, whole = prefix.begin([1, 2]), prefix.begin(PROMPT)
    for session in (failing, whole):
        model.evaluate(session, session.remaining)
    monkeypatch.setattr(failing, "_close", Mock(side_effect=InjectedError))
    with pytest.raises(InjectedError):
        prefix.close()
    assert prefix.closed
    assert store.usage().entries > 0


@pytest.mark.parametrize("make", [CausalCache, lambda: SlidingWindowCache(30)])
def test_a_conversation_that_lacks_its_first_token_is_refused(backend: ml.Backend, make: Any) -> None:
    model = Model(backend, make())
    with PrefixCache(model.cache) as prefix:
        with prefix.begin(PROMPT) as session:
            with pytest.raises(InvalidBatchError, match=r"holds no token from position 0 on.*begins at 1"):
                model.evaluate(session, PROMPT, late=1)
            model.evaluate(session, PROMPT)
        assert prefix.longest([*PROMPT, 1]) == 20


def test_when_the_very_first_pass_raises_inside_its_session_nothing_is_kept(backend: ml.Backend) -> None:
    model = Model(backend, CausalCache())
    with PrefixCache(model.cache) as prefix:
        with pytest.raises(InjectedError), prefix.begin(PROMPT) as session:
            model.evaluate(session, session.remaining, layers=1)
            raise InjectedError
        assert prefix.longest([*PROMPT, 0]) == 0


def test_when_the_very_first_pass_failed_a_later_one_finds_out(
    backend: ml.Backend, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody can know then how many layers there are."""
    model = Model(backend, CausalCache())
    with PrefixCache(model.cache) as prefix:
        session = prefix.begin(PROMPT)
        model.evaluate(session, session.remaining, layers=1)
        session.close()
        with prefix.begin([*PROMPT, 0]) as session:
            assert session.cached == len(PROMPT)
            with pytest.raises(OrderError, match="layer 1 lacks position 0"):
                model.evaluate(session, session.remaining)
        with caplog.at_level(logging.WARNING), prefix.begin([*PROMPT, 0]) as session:
            assert session.cached == 0
            model.evaluate(session, session.remaining)
        assert "kept tokens lack a layer" in caplog.text
        with prefix.begin([*PROMPT, 0, 0]) as session:
            assert session.cached == len(PROMPT) + 1


def test_a_first_pass_that_failed_before_any_state_was_set_is_kept_by_nobody(backend: ml.Backend) -> None:
    cache = RecurrentCache(state_shape=(2,))
    model = Model(backend, cache)
    model.attention = {0}
    with PrefixCache(cache) as prefix:
        session = prefix.begin(PROMPT)
        model.evaluate(session, PROMPT[:4], layers=1)  # attention put its keys, the recurrent layer failed
        session.close()
        with prefix.begin(PROMPT) as again:
            assert again.cached == 0
