"""Synthetic traffic: conversations that begin alike and take turns, from a seed.

An application has a system prompt; conversations choose one by Zipf's law, and one in ``documents`` shared
documents of it by the same law. A conversation takes a geometric number of turns; who speaks next is drawn
from those that are open, the recent ones more often. Some turns are asked again from an earlier point.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

VOCABULARY = 50_000


@dataclass(frozen=True, slots=True)
class Traffic:
    """Lengths are in tokens: means of log-normal draws, where several are drawn."""

    count: int = 6000
    """Requests."""
    applications: int = 60
    documents: int = 40
    """Of each application."""
    exponent: float = 1.0
    """Of Zipf's law: the k-th most popular is chosen with a chance proportional to k ** -exponent."""
    system: int = 60
    document: int = 40
    question: int = 8
    answer: int = 24
    turns: float = 5.0
    """Of a conversation, on average."""
    open: int = 60
    """Conversations that go on at a time."""
    branching: float = 0.05
    """The chance that a turn is asked again from an earlier turn."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One turn: the prompt, and what was answered."""

    conversation: int
    prompt: np.ndarray
    answer: np.ndarray


@dataclass(slots=True)
class _Conversation:
    number: int
    history: np.ndarray
    left: int
    """Turns that are still to come."""
    ends: list[int] = field(default_factory=list)
    """Where answers ended."""


class _Draw:
    """All that is random."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.random = np.random.default_rng(traffic.seed)
        self._chances = {n: _zipf(n, traffic.exponent) for n in (traffic.applications, traffic.documents)}

    def rank(self, of: int) -> int:
        return int(self.random.choice(of, p=self._chances[of]))

    def tokens(self, mean: int) -> np.ndarray:
        spread = 0.6
        size = int(self.random.lognormal(np.log(mean) - spread**2 / 2, spread)) + 1
        return self.random.integers(0, VOCABULARY, size)


def _zipf(count: int, exponent: float) -> np.ndarray:
    weights = np.arange(1, count + 1, dtype=float) ** -exponent
    return weights / weights.sum()


def _shared(traffic: Traffic, mean: int, *which: int) -> np.ndarray:
    """Tokens that are the same whenever they are asked for."""
    random = np.random.default_rng((traffic.seed, *which))
    return random.integers(0, VOCABULARY, int(random.integers(mean // 2, mean * 3 // 2 + 1)))


def system_prompts(traffic: Traffic) -> list[np.ndarray]:
    """Of all applications, the most popular first."""
    return [_shared(traffic, traffic.system, 1, i) for i in range(traffic.applications)]


def requests(traffic: Traffic) -> Iterator[Request]:
    draw, prompts = _Draw(traffic), system_prompts(traffic)
    going: list[_Conversation] = []  # the most recent speaker last
    started = 0
    for _ in range(traffic.count):
        if len(going) < traffic.open:
            talk = _begun(draw, prompts, started)
            started += 1
        else:
            talk = going.pop(-1 - min(int(draw.random.exponential(traffic.open / 3)), len(going) - 1))
        yield _turn(draw, talk)
        if talk.left > 0:
            going.append(talk)


def _begun(draw: _Draw, prompts: list[np.ndarray], number: int) -> _Conversation:
    traffic = draw.traffic
    application = draw.rank(traffic.applications)
    document = _shared(traffic, traffic.document, 2, application, draw.rank(traffic.documents))
    history = np.concatenate((prompts[application], document))
    return _Conversation(number, history, int(draw.random.geometric(1 / traffic.turns)))


def _turn(draw: _Draw, talk: _Conversation) -> Request:
    traffic = draw.traffic
    if talk.ends and draw.random.random() < traffic.branching:
        back = int(draw.random.integers(0, len(talk.ends)))
        talk.history, talk.ends = talk.history[: talk.ends[back]], talk.ends[: back + 1]
    prompt = np.concatenate((talk.history, draw.tokens(traffic.question)))
    answer = draw.tokens(traffic.answer)
    talk.history = np.concatenate((prompt, answer))
    talk.ends.append(int(talk.history.size))
    talk.left -= 1
    return Request(talk.number, prompt, answer)
