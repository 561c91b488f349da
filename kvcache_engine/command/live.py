"""A running engine on the terminal: ``kvcache serve --live``.

``EngineBoard`` runs only in the worker's thread: it receives the requests' events, and inspects the engine
between two passes. Another thread draws the resulting picture.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live

from kvcache.views import render
from kvcache.views.blocks import Block, Facts, Heading, Tiers, tabled
from kvcache.views.pictures import Picture, PrefixPicture
from kvcache.views.words import counted, printable
from kvcache_engine.command.reporting import one_line
from kvcache_engine.engine import Engine, EngineEvent, Failed, Request
from kvcache_engine.requests import Finished, Started, Token
from kvcache_engine.serve.worker import Stopped, Ticket, Worker

__all__ = ["EngineBoard", "EnginePicture", "RequestView", "watching"]

INTERVAL = 0.25
"""Seconds between two pictures."""
ENDED, EVENTS, ROWS = 6, 6, 16
"""The most ended requests, events, and requests in total that are shown."""


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request: ``cached`` of its prompt's tokens were found; None before it has started."""

    request: int
    state: str
    """"waiting", "prefill", "decode", or how it ended."""
    prompt: int
    cached: int | None
    generated: int
    rate: float | None
    """Tokens per second from its first one on; None before the second."""


@dataclass(frozen=True)
class EnginePicture(Picture):
    """An engine at one moment: its requests, the prefix tree's tiers, the cells, and the latest events."""

    requests: tuple[RequestView, ...]
    """Running and waiting requests, and those that ended last."""
    counts: Mapping[str, int]
    """The numbers of "running", "waiting" and "ended" requests, and of "preemptions"."""
    generated: int
    rate: float
    """Tokens per second since the last picture."""
    prefix: PrefixPicture
    events: tuple[tuple[str, str], ...]
    """(time of day, description), oldest first."""

    def blocks(self) -> Iterator[Block]:
        counts = ", ".join(f"{count:,} {name}" for name, count in self.counts.items())
        yield Heading(
            "requests", f"{counts}; {counted(self.generated, 'token')}, {self.rate:.1f} tokens/s", beside=True
        )
        head = ("request", "state", "prompt", "cached", "generated", "tokens/s")
        rows = [
            (
                f"{view.request}",
                view.state,
                f"{view.prompt:,}",
                "-" if view.cached is None else f"{view.cached:,}",
                f"{view.generated:,}",
                "-" if view.rate is None else f"{view.rate:.1f}",
            )
            for view in self.requests[:ROWS]
        ]
        yield tabled("requests", head, rows, more=len(self.requests) - len(rows))
        for block in self.prefix.blocks():
            if isinstance(block, Heading | Tiers):
                yield block
        if self.events:
            yield Heading("events")
            yield Facts(self.events)


@dataclass(slots=True)
class _Progress:
    """A request in progress; ``first`` and ``last`` are the times of its first and its last token."""

    request: Request
    first: float | None = None
    last: float = 0.0

    def view(self, state: str) -> RequestView:
        run = self.request.run
        generated, elapsed = run.generated, 0.0 if self.first is None else self.last - self.first
        rate = (generated - 1) / elapsed if elapsed and generated > 1 else None
        return RequestView(
            run.request,
            state,
            run.prompt_tokens,
            run.reused if self.request.started else None,
            generated,
            rate,
        )


class EngineBoard:
    """Collects the events of a worker's requests (``observe``) and makes pictures of them (``look``). Call
    both in the worker's thread. ``clock`` counts seconds, ``now`` is the time of day.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], str] = lambda: time.strftime("%H:%M:%S"),
    ) -> None:
        self._clock, self._now = clock, now
        self._requests: dict[int, _Progress] = {}
        self._over: deque[RequestView] = deque(maxlen=ENDED)
        self._ended = 0
        self._events: deque[tuple[str, str]] = deque(maxlen=EVENTS)
        self._counted: dict[str, int] = {}
        self._last: tuple[float, int] | None = None

    def observe(self, ticket: Ticket, event: EngineEvent) -> None:
        """Record an event of the request of ``ticket``."""
        if ticket.request is None:
            return
        progress = self._requests.setdefault(event.request, _Progress(ticket.request))
        if isinstance(event, Started):
            self._note(
                f"request {event.request} started: {event.reused:,} of "
                f"{counted(event.prompt_tokens, 'prompt token')} cached"
            )
        elif isinstance(event, Token) and event.token is not None:
            progress.last = self._clock()
            progress.first = progress.last if progress.first is None else progress.first
        elif isinstance(event, Finished):
            self._end(progress, event.reason)
        elif isinstance(event, Failed):
            self._end(progress, "failed", f": {printable(one_line(event.error))}")

    def look(self, engine: Engine) -> EnginePicture:
        """A picture of the engine's current state, which it does not change."""
        now, generated = self._clock(), engine.statistics.generated_tokens
        then, before = self._last or (now, generated)
        self._last = now, generated
        for request in (*engine.running, *engine.waiting):
            self._requests.setdefault(request.id, _Progress(request))
        for progress in [each for each in self._requests.values() if each.request.done]:
            self._end(progress, "cancelled")
        prefix = render(engine.prefix, nodes=0)
        self._note_counts(engine, prefix)
        running = [
            self._requests[each.id].view("prefill" if each.run.prefilling else "decode")
            for each in engine.running
        ]
        waiting = [self._requests[each.id].view("waiting") for each in engine.waiting]
        counts = {
            "running": len(running),
            "waiting": len(waiting),
            "ended": self._ended,
            "preemptions": engine.preemptions,
        }
        rate = (generated - before) / (now - then) if now > then else 0.0
        requests = (*running, *waiting, *reversed(self._over))
        return EnginePicture(requests, counts, generated, rate, prefix, tuple(self._events))

    def _end(self, progress: _Progress, state: str, why: str = "") -> None:
        view = progress.view(state)
        self._requests.pop(view.request, None)
        self._over.append(view)
        self._ended += 1
        self._note(f"request {view.request} ended ({state}): {counted(view.generated, 'token')}{why}")

    def _note(self, what: str) -> None:
        self._events.append((self._now(), what))

    def _note_counts(self, engine: Engine, prefix: PrefixPicture) -> None:
        """Record an event for each count that has grown since the last picture."""
        counts = {"preempted": engine.preemptions, "evicted from the prefix tree": prefix.evicted}
        counts |= {f"lost on the way to {tier}": count for tier, count in engine.prefix.failed.items()}
        counts |= {f"store errors ({kind})": count for kind, count in engine.prefix.store_errors.items()}
        for what, count in counts.items():
            if more := count - self._counted.get(what, 0):
                self._note(f"{more:,} {what}")
        self._counted = counts


@contextlib.contextmanager
def watching(worker: Worker, console: Console, interval: float = INTERVAL) -> Iterator[None]:
    """Draw the state of ``worker`` on ``console`` every ``interval`` seconds, in a separate thread. A last
    picture is taken at the end of the block, and stays.
    """
    board, over = EngineBoard(), threading.Event()

    def follow() -> None:
        with Live(console=console, auto_refresh=False) as live, contextlib.suppress(Stopped):
            last = False
            while not last:
                last = over.wait(interval)
                live.update(worker.post(board.look).result(), refresh=True)

    thread = threading.Thread(target=follow, name="live", daemon=True)
    worker.observers.append(board.observe)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        worker.observers.remove(board.observe)
