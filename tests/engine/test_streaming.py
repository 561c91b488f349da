"""``Engine.stream``: from tasks and threads at once; who goes away cancels; errors reach who asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest

import ml
from kvcache import ClosedError
from kvcache_engine import (
    Engine,
    EngineOptions,
    Finished,
    GenerationOptions,
    RequestError,
    Token,
    Tokenizer,
    bundled_model,
    load_model,
)

SETTINGS = GenerationOptions(12, ignore_eos=True)
LONG = GenerationOptions(400, ignore_eos=True)
PROMPTS = ["In the beginning", "And God said", "In the beginning God", "the sea", "And God saw", "Noah"]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with ml.open_backend("numpy") as backend:
        model = load_model(bundled_model(), backend)
        tokenizer = Tokenizer.load(bundled_model())
        with Engine(model, tokenizer, EngineOptions(max_sequences=3, capacity=512)) as made:
            yield made


async def text_of(engine: Engine, prompt: str, settings: GenerationOptions = SETTINGS) -> str:
    return "".join([token.text async for token in engine.stream(prompt, settings)])


def idle(engine: Engine) -> None:
    """Nothing is left of what went away, and what it held is free."""
    for _ in range(2000):
        with engine.lock:
            if not engine.busy:
                break
        threading.Event().wait(0.005)
    assert not engine.busy
    assert not engine.prefix.sessions
    assert engine.take_events() == []


def test_tasks_and_threads_stream_at_once_while_others_step(engine: Engine) -> None:
    expected = [answer.text for answer in engine.complete(PROMPTS, SETTINGS)]
    found: dict[int, list[str]] = {}

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(text_of(engine, prompt) for prompt in PROMPTS))

    def ask(i: int) -> None:
        found[i] = asyncio.run(all_of_them())

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    completed = [answer.text for answer in engine.complete(PROMPTS, SETTINGS)]
    for thread in threads:
        thread.join()
    assert completed == expected
    assert found == dict.fromkeys(range(3), expected)
    idle(engine)


def test_who_goes_away_cancels(engine: Engine) -> None:
    """A cancelled task, one cancelled before it began, a generator that is closed, and one dropped."""

    async def run() -> str:
        begun = asyncio.Event()

        async def listen() -> None:
            async for _ in engine.stream(PROMPTS[0], LONG):
                begun.set()

        tasks = [asyncio.create_task(listen()) for _ in range(2)]
        await begun.wait()
        for task in tasks:
            task.cancel()
        waiting = asyncio.create_task(listen())
        await asyncio.sleep(0)
        waiting.cancel()
        async with aclosing(engine.stream(PROMPTS[1], LONG)) as tokens:
            await anext(tokens)
        dropped = engine.stream(PROMPTS[2], LONG)
        await anext(dropped)
        del dropped
        results = await asyncio.gather(*tasks, waiting, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        return await text_of(engine, PROMPTS[3])

    said = asyncio.run(run())
    idle(engine)
    assert said == engine.complete([PROMPTS[3]], SETTINGS)[0].text
    assert engine.statistics.generated_tokens < 400


def test_a_request_that_the_engine_cancels_ends_its_stream_with_an_error(engine: Engine) -> None:
    async def run() -> None:
        async for _ in engine.stream(PROMPTS[0], LONG):
            with engine.lock:
                for request in [*engine.running]:
                    assert engine.cancel(request)

    with pytest.raises(RequestError, match="stream: the request was cancelled meanwhile"):
        asyncio.run(asyncio.wait_for(run(), 60))
    idle(engine)


def test_the_last_item_may_be_the_whole_answer(engine: Engine) -> None:
    (expected,) = engine.complete(PROMPTS[:1], SETTINGS)

    async def items(include_finished: bool) -> list[Token | Finished]:
        stream = engine.stream(PROMPTS[0], SETTINGS, include_finished=include_finished)
        return [item async for item in stream]

    *tokens, last = asyncio.run(items(True))
    assert isinstance(last, Finished)
    assert (last.reason, last.text) == ("length", expected.text)
    assert last.reused == last.prompt_tokens - 1 > 0
    assert all(isinstance(token, Token) for token in [*tokens, *asyncio.run(items(False))])


def test_errors_reach_who_asked(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a request alone, of a pass, and of an engine that is closed meanwhile."""

    async def refused() -> None:
        with pytest.raises(RequestError, match="the prompt is empty"):
            await text_of(engine, [])  # type: ignore[arg-type]
        other = asyncio.create_task(text_of(engine, PROMPTS[0]))
        with pytest.raises(RequestError, match="prompt has token 999999"):
            await text_of(engine, [999999])  # type: ignore[arg-type]
        assert await other

    asyncio.run(refused())
    forward = engine.model.forward

    def lost(*arguments: Any) -> Any:
        raise RuntimeError("lost")

    async def failing() -> str:
        tokens = engine.stream(PROMPTS[0], LONG)
        await anext(tokens)
        monkeypatch.setattr(engine.model, "forward", lost)
        with pytest.raises(RuntimeError, match="lost"):
            async for _ in tokens:
                pass
        monkeypatch.setattr(engine.model, "forward", forward)
        return await text_of(engine, PROMPTS[0])

    assert asyncio.run(failing())
    idle(engine)

    async def closed() -> None:
        tokens = engine.stream(PROMPTS[0], LONG)
        await anext(tokens)
        await asyncio.to_thread(engine.close)
        with pytest.raises(ClosedError):
            async for _ in tokens:
                pass

    asyncio.run(closed())
