"""Whether fetching a prefix from a store beats computing it, by what reads and passes took.

Fetching n tokens takes a look-up and their bytes, computing them the model's time::

    fetching(n)  = latency + n * bytes per token / bytes per second
    computing(n) = n / tokens per second

A store is asked where fetching(n) is at most ``slack`` seconds more than computing(n). Before the look-up n
is what could be there at most, behind it what is there. Whatever has not been measured yet is in favour of
asking: the first answers are what measures it.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvcache.cache import InvalidRangeError

__all__ = ["BreakEven", "Decision", "Link", "Reason"]

Reason = Literal["always", "unmeasured", "fetching", "computing"]
"""Why a store is asked, or (computing) is not: told to, something is not measured yet, what is faster."""

FADE = 0.8
"""What a sample weighs when the next one comes."""
LEAST = 32
"""Tokens; a pass over fewer takes hardly less time, and does not say how fast prompts are computed."""


class Link(NamedTuple):
    """The way to a store: ``bytes_per_second``, and the seconds of a look-up."""

    bytes_per_second: float
    latency: float = 0.0


class Decision(NamedTuple):
    """Whether to ask a store; ``fetching`` and ``computing``: seconds, None: not measured."""

    fetch: bool
    reason: Reason
    fetching: float | None = None
    computing: float | None = None


@dataclass(slots=True)
class _Ratio:
    """An exponential average of a ratio, in which large samples weigh more than small ones."""

    amount: float = 0.0
    over: float = 0.0
    outdated: bool = False
    """The next sample counts alone."""

    def add(self, amount: float, over: float) -> None:
        fade, self.outdated = 0.0 if self.outdated else FADE, False
        self.amount = fade * self.amount + amount
        self.over = fade * self.over + over

    @property
    def value(self) -> float | None:
        """None until there is a sample."""
        return self.amount / self.over if self.over > 0 else None


@dataclass(slots=True)
class _Meter:
    """What is measured of one store. ``of``: a weak reference to it, the store itself where it takes none."""

    of: object
    probed: float
    """When it was asked last."""
    speed: _Ratio = field(default_factory=_Ratio)
    latency: _Ratio = field(default_factory=_Ratio)
    asked: bool = False
    reading: int = 0
    """Reads under way. They share the link: what counts is the time in which there are any."""
    since: float = 0.0
    nbytes: int = 0


@dataclass(slots=True)
class Read:
    """A read under way, and how many bytes it has brought."""

    nbytes: int = 0


class BreakEven:
    """Decides for a PrefixCache, or several of one device, by exponential averages. Called from any thread.

    ``always``: every store is asked. Computing has to be ``slack`` seconds faster before a store is not
    asked; one that is not is probed in the background, at most every ``probe_every`` seconds. What was
    measured of a store goes with it.

    Raises InvalidRangeError for a ``probe_every`` that is not above 0, and a ``slack`` below 0.
    """

    def __init__(
        self,
        *,
        always: bool = False,
        slack: float = 0.05,
        probe_every: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not probe_every > 0:
            raise InvalidRangeError(f"BreakEven: probe_every={probe_every}; it must be above 0")
        if not slack >= 0:
            raise InvalidRangeError(f"BreakEven: slack={slack}; it must be at least 0")
        self.always, self.slack, self.probe_every = always, slack, probe_every
        self.counts: Counter[str] = Counter()
        """How many look-ups in a store were decided for which ``Reason``."""
        self._clock = clock
        self._bytes_per_token, self._tokens_per_second = _Ratio(), _Ratio()
        self._meters: dict[int, _Meter] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        speed, size = self.tokens_per_second, self.bytes_per_token
        known = [
            "not measured yet" if speed is None else f"{speed:,.0f} tokens of prompts/s",
            *([] if size is None else [f"{size:,.0f} bytes a token"]),
            f"stores measured: {len(self._meters)}",
        ]
        return f"<BreakEven{', always' if self.always else ''}: {', '.join(known)}>"

    # What is measured.

    @property
    def tokens_per_second(self) -> float | None:
        """How fast prompts are computed; None: not known yet."""
        return self._tokens_per_second.value

    @property
    def bytes_per_token(self) -> float | None:
        """What one token takes in a store; None: not known yet."""
        return self._bytes_per_token.value

    def link(self, store: object) -> Link | None:
        """The way to a store; None: not known yet."""
        with self._lock:
            meter = self._meter(store)
            speed, latency = meter.speed.value, meter.latency.value
        return None if not speed else Link(speed, latency or 0.0)

    def computed(self, tokens: int, seconds: float) -> None:
        """A pass over ``tokens`` of prompts took so long."""
        if tokens >= LEAST and seconds > 0:
            with self._lock:
                self._tokens_per_second.add(tokens, seconds)

    def sized(self, nbytes: int, tokens: int) -> None:
        """An entry of ``tokens`` has so many bytes."""
        if tokens > 0:
            with self._lock:
                self._bytes_per_token.add(nbytes, tokens)

    @contextlib.contextmanager
    def looking(self, store: object) -> Iterator[None]:
        """Time a look-up; not the first one, which connects, nor one that raises."""
        began = self._clock()
        yield
        with self._lock:
            meter = self._meter(store)
            if meter.asked:
                meter.latency.add(self._clock() - began, 1)
            meter.asked = True

    @contextlib.contextmanager
    def reading(self, store: object) -> Iterator[Read]:
        """Time a read, whose bytes the block says; those that go on at the same time count as one."""
        read = Read()
        with self._lock:
            meter = self._meter(store)
            if not meter.reading:
                meter.since, meter.nbytes = self._clock(), 0
            meter.reading += 1
        try:
            yield read
        finally:
            with self._lock:
                meter.reading -= 1
                meter.nbytes += read.nbytes
                seconds = self._clock() - meter.since
                if not meter.reading and meter.nbytes and seconds > 0:
                    # A small entry takes a look-up's time, and would tell nothing of the bytes of large ones.
                    meter.speed.add(meter.nbytes, max(seconds - (meter.latency.value or 0.0), seconds / 10))

    def _meter(self, store: object) -> _Meter:
        meters, number = self._meters, id(store)
        if number not in meters:
            of: object = store
            with contextlib.suppress(TypeError):  # while it is held, no other store has its number
                of = weakref.ref(store, lambda _: meters.pop(number, None))
            meters[number] = _Meter(of, probed=self._clock())
        return meters[number]

    # What follows from it.

    def decide(self, store: object, tokens: int) -> Decision:
        """Whether to ask a store that has ``tokens`` of a prompt, or may have them."""
        if self.always:
            return Decision(True, "always")
        link, size, prefill = self.link(store), self.bytes_per_token, self.tokens_per_second
        if not link or not size or not prefill:
            return Decision(True, "unmeasured")
        fetching, computing = link.latency + tokens * size / link.bytes_per_second, tokens / prefill
        if fetching <= computing + self.slack:
            return Decision(True, "fetching", fetching, computing)
        return Decision(False, "computing", fetching, computing)

    def pays(self, store: object) -> bool:
        """Whether a store's bytes come faster than they are computed, as far as is known."""
        link, size, prefill = self.link(store), self.bytes_per_token, self.tokens_per_second
        if self.always or not link or not size or not prefill:
            return True
        return size * prefill <= link.bytes_per_second

    def note(self, store: object, decision: Decision) -> bool:
        """Count a look-up that is over. True: the store was not asked, and it is time to probe it."""
        with self._lock:
            self.counts[decision.reason] += 1
            meter, now = self._meter(store), self._clock()
            due = not decision.fetch and now - meter.probed >= self.probe_every
            if decision.fetch or due:
                meter.probed = now
            if due:
                meter.speed.outdated = meter.latency.outdated = True
            return due
