"""Whether fetching a prefix from a store is faster than computing it, according to measured reads and passes.

Fetching n tokens takes a look-up and the transfer of their bytes, computing them takes the model's time::

    fetching(n)  = latency + n * bytes per token / bytes per second
    computing(n) = n / tokens per second

A store is asked if fetching(n) takes at most ``slack`` seconds longer than computing(n). Before the look-up,
n is the most that could be stored; after it, n is what is stored. As long as something has not been measured,
the store is asked, so that its answers measure it.
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
"""Why a store is asked, or is not ("computing"): by configuration, because something is unmeasured, or by
comparison.
"""

FADE = 0.8
"""The weight of a sample when the next one arrives."""
LEAST = 32
"""The fewest tokens of a pass that is measured: shorter passes take hardly less time, and do not show how
fast prompts are computed.
"""


class Link(NamedTuple):
    """The link to a store: ``bytes_per_second``, and the seconds of a look-up."""

    bytes_per_second: float
    latency: float = 0.0


class Decision(NamedTuple):
    """Whether to ask a store; ``fetching`` and ``computing`` are in seconds, None if not measured."""

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
    """Whether the next sample replaces the average."""

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
    """The measurements of one store. ``of``: a weak reference to it, or the store itself if it does not allow
    one.
    """

    of: object
    probed: float
    """When the store was last probed."""
    speed: _Ratio = field(default_factory=_Ratio)
    latency: _Ratio = field(default_factory=_Ratio)
    asked: bool = False
    reading: int = 0
    """Reads in progress. They share the link, so the time during which there are any is what counts."""
    since: float = 0.0
    nbytes: int = 0


@dataclass(slots=True)
class Read:
    """A read in progress, and how many bytes it has returned."""

    nbytes: int = 0


class BreakEven:
    """Decides for a PrefixCache, or several of one device, by exponential averages. Called from any thread.

    ``always``: every store is asked. Otherwise a store is not asked if computing is faster by more than
    ``slack`` seconds; it is then probed in the background, at most every ``probe_every`` seconds.
    Measurements of a store are forgotten with the store.

    Raises InvalidRangeError for a ``probe_every`` that is not above 0, and a ``slack`` below 0.

    >>> from kvcache import BreakEven, PrefixOptions
    >>> options = PrefixOptions(break_even=BreakEven(slack=0.05))    # fetch unless computing saves 50 ms
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
        """The number of look-ups decided for each ``Reason``."""
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

    # Measurements.

    @property
    def tokens_per_second(self) -> float | None:
        """How fast prompts are computed; None if not yet known."""
        return self._tokens_per_second.value

    @property
    def bytes_per_token(self) -> float | None:
        """The stored bytes of one token; None if not yet known."""
        return self._bytes_per_token.value

    def link(self, store: object) -> Link | None:
        """The link to a store; None if not yet known."""
        with self._lock:
            meter = self._meter(store)
            speed, latency = meter.speed.value, meter.latency.value
        return None if not speed else Link(speed, latency or 0.0)

    def computed(self, tokens: int, seconds: float) -> None:
        """Record that a pass over ``tokens`` prompt tokens took ``seconds``."""
        if tokens >= LEAST and seconds > 0:
            with self._lock:
                self._tokens_per_second.add(tokens, seconds)

    def sized(self, nbytes: int, tokens: int) -> None:
        """Record that an entry of ``tokens`` tokens has ``nbytes`` bytes."""
        if tokens > 0:
            with self._lock:
                self._bytes_per_token.add(nbytes, tokens)

    @contextlib.contextmanager
    def looking(self, store: object) -> Iterator[None]:
        """Time a look-up, except the first one, which connects, and those that raise."""
        began = self._clock()
        yield
        with self._lock:
            meter = self._meter(store)
            if meter.asked:
                meter.latency.add(self._clock() - began, 1)
            meter.asked = True

    @contextlib.contextmanager
    def reading(self, store: object) -> Iterator[Read]:
        """Time a read, whose bytes the block reports; concurrent reads count as one."""
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
                    # A small entry takes as long as a look-up, and says nothing about the transfer of large
                    # ones.
                    meter.speed.add(meter.nbytes, max(seconds - (meter.latency.value or 0.0), seconds / 10))

    def _meter(self, store: object) -> _Meter:
        meters, number = self._meters, id(store)
        if number not in meters:
            of: object = store
            with contextlib.suppress(TypeError):  # while it is referenced, no other store has its id
                of = weakref.ref(store, lambda _: meters.pop(number, None))
            meters[number] = _Meter(of, probed=self._clock())
        return meters[number]

    # Decisions.

    def decide(self, store: object, tokens: int) -> Decision:
        """Whether to ask a store that has, or may have, ``tokens`` tokens of a prompt."""
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
        """Whether reading a store's bytes is faster than computing them, as far as is known."""
        link, size, prefill = self.link(store), self.bytes_per_token, self.tokens_per_second
        if self.always or not link or not size or not prefill:
            return True
        return size * prefill <= link.bytes_per_second

    def note(self, store: object, decision: Decision) -> bool:
        """Count a finished look-up. True if the store was not asked and it is time to probe it."""
        with self._lock:
            self.counts[decision.reason] += 1
            meter, now = self._meter(store), self._clock()
            due = not decision.fetch and now - meter.probed >= self.probe_every
            if decision.fetch or due:
                meter.probed = now
            if due:
                meter.speed.outdated = meter.latency.outdated = True
            return due
