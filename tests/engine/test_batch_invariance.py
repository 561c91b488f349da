"""``batch_invariant``: answers are those of an empty cache, bit for bit, whoever runs beside."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ml
from kvcache import HostTier
from kvcache_engine.engine import Engine
from kvcache_engine.errors import RequestError
from kvcache_engine.loading import load_model
from kvcache_engine.options import EngineOptions, SpeculativeOptions
from kvcache_engine.requests import GenerationOptions

from ..rigs.small_models import KINDS

BLOCK = 16
ANSWER = GenerationOptions(3, ignore_eos=True)


class Heard:
    """An engine, and the bits of the logits that each request's tokens were drawn from."""

    def __init__(self, model: Any, tiers: Any = (), **options: Any) -> None:
        given = {"max_sequences": 3, "capacity": 128, "block_size": BLOCK, "interval": BLOCK, **options}
        self.engine = Engine(
            model, None, EngineOptions(cache_dtype=model.dtype, batch_invariant=True, **given), tiers
        )
        self.logits: dict[int, list[bytes]] = {}
        forward = model.forward

        def listening(ctx: ml.Context, batch: Any, cache: Any) -> ml.Tensor:
            found: ml.Tensor = forward(ctx, batch, cache)
            (request,) = (one for one in self.engine.running if one.session.seq == batch.sequences[0])
            if batch.outputs:
                self.logits.setdefault(request.id, []).append(found.to_numpy().tobytes())
            return found

        self._model, self._forward = model, forward
        model.forward = listening

    def __enter__(self) -> Heard:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close(flush=False)
        self._model.forward = self._forward

    def ask(self, *prompts: list[int], settings: GenerationOptions = ANSWER) -> list[Any]:
        """All at once."""
        requests = [self.engine.submit(prompt, settings) for prompt in prompts]
        while self.engine.busy:
            self.engine.step()
        return requests


def prompts_of(seed: int, count: int) -> Iterator[list[int]]:
    """Each goes on from somewhere in one before it, or from its answer, most of the time."""
    draw, known = random.Random(seed), [[7, 8, 9]]
    for _ in range(count):
        before = draw.choice(known)
        prompt = before[: draw.randint(len(before) // 2, len(before))]
        prompt = prompt + [draw.randrange(3, 250) for _ in range(draw.randint(1, 40))]
        known.append(prompt[:80])
        yield prompt[:80]


@pytest.fixture(params=["numpy", "torch", "mlx"])
def opened(request: pytest.FixtureRequest) -> Iterator[ml.Backend]:
    pytest.importorskip({"mlx": "mlx.core"}.get(request.param, request.param))
    with ml.open_backend(request.param) as backend:
        yield backend


@pytest.mark.parametrize("dtype", [ml.DType.F32, ml.DType.BF16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_an_empty_cache_whatever_is_found(
    opened: ml.Backend, kind: str, dtype: ml.DType, make_model: Callable[..., Path]
) -> None:
    model = load_model(make_model(**KINDS[kind]), opened, dtype=dtype)
    prompts, reused = [*prompts_of(3, 9)], 0
    cold = []
    for prompt in prompts:
        with Heard(model) as heard:
            (alone,) = heard.ask(prompt)
            cold.append((alone.tokens, heard.logits[alone.id]))
    with Heard(model, [HostTier(1 << 24)]) as heard:
        for i in range(0, len(prompts), 3):
            for j, request in enumerate(heard.ask(*prompts[i : i + 3])):
                assert (request.tokens, heard.logits[request.id]) == cold[i + j]
                assert request.answer.reused % BLOCK == 0
                reused += request.answer.reused
            if i:
                heard.engine.prefix.evict()
    assert reused >= 2 * BLOCK


def test_a_request_that_made_room_goes_on_as_if_it_had_not(small: Any) -> None:
    """Its prompt is computed in blocks again, and its answer token by token."""
    prompts = [[*range(3, 43)], [*range(60, 100)]]
    settings = GenerationOptions(20, ignore_eos=True)
    cold = []
    for prompt in prompts:
        with Heard(small) as heard:
            (request,) = heard.ask(prompt, settings=settings)
            cold.append((request.tokens, heard.logits[request.id]))
    with Heard(small, capacity=48, max_sequences=2, context=64) as heard:
        requests = heard.ask(*prompts, settings=settings)
        assert heard.engine.preemptions
        for request, (tokens, logits) in zip(requests, cold, strict=True):
            assert request.tokens == tokens
            assert {*heard.logits[request.id]} == {*logits}


def test_blocks_in_a_store_are_kept_from_engines_without_the_option(small: Any, tmp_path: Path) -> None:
    store, prompt = f"file://{tmp_path / 'store'}", [*range(3, 60)]
    found = []
    for invariant in (True, False, True, False):
        options = EngineOptions(capacity=128, block_size=BLOCK, batch_invariant=invariant)
        with Engine(small, None, options, [store]) as engine:
            found.append(engine.complete([prompt], ANSWER)[0].reused)
    assert found == [0, 0, 48, 48]


def test_drafts_are_refused() -> None:
    with pytest.raises(RequestError, match=r"batch_invariant=True; passes that verify drafts"):
        SpeculativeOptions(batch_invariant=True)


def test_a_pass_has_one_request_and_all_get_theirs_in_turn(small: Any) -> None:
    with Heard(small) as heard:
        for prompt in ([*range(3, 53)], [*range(60, 70)]):
            heard.engine.submit(prompt, ANSWER)
        order = []
        while heard.engine.busy:
            before = {request.id: request.run.stored for request in heard.engine.running}
            heard.engine.step()
            order += [one.id for one in heard.engine.running if one.run.stored > before.get(one.id, 0)]
        assert order[:5] == [0, 1, 0, 1, 0]
        assert np.diff([i for i, one in enumerate(order) if one == 1]).max() <= 2
