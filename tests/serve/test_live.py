"""``kvcache serve --live``: requests, tiers, cells and events of a running engine, drawn on a terminal."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator

import pytest

pytest.importorskip("typer")
pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

from rich.console import Console

from kvcache_engine.command.live import EngineBoard, EnginePicture, watching
from kvcache_engine.engine import Engine, EngineOptions
from kvcache_engine.requests import GenerationOptions
from kvcache_engine.serve import Worker
from kvcache_engine.serve.worker import Ticket

from .serve_rig import PROMPT, app_of, asked_in_process, opened

OPTIONS = EngineOptions(max_sequences=1, capacity=64)


class Watched:
    """An engine, and a board that hears of its requests; each look and each event is a second later."""

    def __init__(self, engine: Engine) -> None:
        seconds = itertools.count()
        self.engine = engine
        self.board = EngineBoard(lambda: float(next(seconds)), lambda: "12:00:00")
        self.tickets: dict[int, Ticket] = {}

    def submit(self, count: int) -> Ticket:
        ticket = Ticket.__new__(Ticket)
        ticket.request = self.engine.submit(PROMPT, GenerationOptions(count, ignore_eos=True))
        self.tickets[ticket.request.id] = ticket
        return ticket

    def step(self) -> None:
        for event in self.engine.step():
            self.board.observe(self.tickets[event.request], event)

    def look(self) -> EnginePicture:
        return self.board.look(self.engine)


@pytest.fixture
def watched() -> Iterator[Watched]:
    with opened(OPTIONS) as engine:
        yield Watched(engine)


def states(picture: EnginePicture) -> list[tuple[int, str, int | None, int]]:
    return [(each.request, each.state, each.cached, each.generated) for each in picture.requests]


def test_requests_are_shown_while_they_wait_run_and_after_they_ended(watched: Watched) -> None:
    watched.submit(3)
    watched.submit(2)
    assert states(watched.look()) == [(0, "waiting", None, 0), (1, "waiting", None, 0)]
    watched.step()
    watched.step()
    picture = watched.look()
    assert states(picture) == [(0, "decode", 0, 2), (1, "waiting", None, 0)]
    assert picture.requests[0].rate == 1.0, "two tokens, a second apart"
    while watched.engine.busy:
        watched.step()
    picture = watched.look()
    prompt = picture.requests[0].prompt
    assert states(picture) == [(1, "length", prompt - 1, 2), (0, "length", 0, 3)]
    assert picture.counts == {"running": 0, "waiting": 0, "ended": 2, "preemptions": 0}
    assert picture.generated == 5
    assert picture.prefix.reused == prompt - 1
    assert [what for _, what in picture.events] == [
        f"request 0 started: 0 of {prompt} prompt tokens cached",
        "request 0 ended (length): 3 tokens",
        f"request 1 started: {prompt - 1} of {prompt} prompt tokens cached",
        "request 1 ended (length): 2 tokens",
    ]


def test_a_request_that_is_cancelled_or_evicts_is_an_event(watched: Watched) -> None:
    ticket = watched.submit(3)
    watched.step()
    watched.look()
    assert ticket.request is not None
    watched.engine.cancel(ticket.request)
    watched.engine.prefix.evict()
    picture = watched.look()
    assert states(picture) == [(0, "cancelled", 0, 1)]
    events = [what for _, what in picture.events]
    assert events[-2:] == [
        "request 0 ended (cancelled): 1 token",
        f"{picture.prefix.evicted} evicted from the prefix tree",
    ]
    assert [what for _, what in watched.look().events] == events, "each is told once"


def test_looking_changes_neither_the_engine_nor_its_answers(watched: Watched) -> None:
    plain = watched.engine.complete([PROMPT], GenerationOptions(4))[0].text
    watched.engine.forget()
    watched.engine.reset()
    request = watched.submit(4).request
    assert request is not None
    while watched.engine.busy:
        watched.look()
        watched.step()
        assert watched.look().prefix == watched.look().prefix
    assert request.run.text == plain


def test_a_picture_is_plain_text_that_fits_and_data(watched: Watched) -> None:
    watched.submit(2)
    watched.step()
    picture = watched.look()
    for width in (40, 80):
        text = picture.text(width)
        assert max(map(len, text.splitlines())) <= width
        assert "\x1b" not in text
    assert "requests  1 running, 0 waiting, 0 ended, 0 preemptions; 1 token," in picture.text(120)
    assert "cells used" in picture.text()
    assert "device " in picture.text()
    assert picture.record()["requests"][0]["state"] == "decode"


def screen() -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=True, width=100, height=40, highlight=False), stream


def test_a_server_is_drawn_and_the_last_picture_stays() -> None:
    console, stream = screen()
    with Worker(lambda: opened(OPTIONS)) as worker:
        app = app_of(worker)
        observers = list(worker.observers)
        with watching(worker, console, interval=60):  # one look, at the end
            body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
            assert asked_in_process(app, "/v1/completions", body).status_code == 200
        assert worker.observers == observers, "nothing is observed any more"
        shown = stream.getvalue()
    assert "1 ended" in shown
    assert "request 0 ended (length): 4 tokens" in shown


def test_what_is_drawn_ends_with_an_engine_that_stops() -> None:
    console, _ = screen()
    worker = Worker(lambda: opened(OPTIONS))
    with worker:
        pass
    with watching(worker, console, interval=60):
        pass
