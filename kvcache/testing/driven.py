"""The suite for caches of other libraries, which are connected by a driver of about thirty lines.

A driver feeds tokens to the cache and reports which of them each query attends to. Tokens are numbers:
``keys_and_values`` turns them into rows that survive quantization, and ``attended`` determines what a query
sees from the rows and the mask that the cache passes to attention::

    from kvcache.testing import CacheDriver, DrivenTests, attended, keys_and_values

    class Mine(CacheDriver):
        absent = frozenset({"window", "select", "copy", "save"})

        def __init__(self, span, sequences):
            super().__init__(span, sequences)
            self.cache = my_library.Cache(sequences)

        def feed(self, tokens):
            keys, values, mask = self.cache.put(*keys_and_values(tokens))
            return attended(keys, values, mask, tokens)

        def crop(self, count):
            self.cache.drop_last(count)

    class TestMine(DrivenTests):
        driver = Mine

Each area is checked with random traces against plain lists of tokens. An operation may raise for anything
that the cache does not support; the cache must then be unchanged. A wrong answer fails, and the trace is
reduced to the fewest calls that still fail. ``check`` returns the outcomes instead of failing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
import pytest

from kvcache.cache import NotSupportedError

__all__ = [
    "AREAS", "CacheDriver", "DrivenTests", "Outcome", "Span", "attended", "check", "keys_and_values",
]  # fmt: skip

AREAS: Mapping[str, str] = {
    "tokens": "one sequence, in chunks and token by token",
    "batch": "sequences of one length in a batch",
    "padding": "prompts of different lengths in a batch",
    "crop": "the last tokens are removed, and others follow",
    "draft": "drafted tokens are fed, and some of them removed",
    "select": "rows of the batch are kept, repeated and reordered, as in beam search",
    "join": "a sequence of another cache is added to this one",
    "copy": "a sequence and its copy continue independently",
    "save": "a cache is saved, loaded and continued",
}
"""The tested areas by name; a driver declares unsupported areas absent."""

TRACES = 40
LONGEST = 48
"""The most tokens of a sequence in a trace, and thus the capacity that a cache needs."""
DIM = 64
_BITS = 16
Tokens = Sequence[Sequence[int]]
Seen = list[list[list[Any]]]
"""For each sequence and query, the tokens attended to, in any order."""


@dataclass(frozen=True)
class Span:
    """Which tokens a query at position p attends to, including its own: by default all up to p.

    ``window``: only that many of the last. ``chunk``: only those from p - p % chunk on.
    """

    window: int | None = None
    chunk: int | None = None

    def of(self, position: int) -> slice:
        first = 0 if self.window is None else max(0, position - self.window + 1)
        return slice(first if self.chunk is None else position - position % self.chunk, position + 1)


class CacheDriver:
    """One cache with some sequences, initially empty."""

    absent: ClassVar[frozenset[str]] = frozenset()
    """The areas of ``AREAS`` that the cache does not support; their methods may be missing."""

    def __init__(self, span: Span, sequences: int) -> None:
        self.span, self.sequences = span, sequences

    def feed(self, tokens: Tokens) -> Seen:
        """One pass: append ``tokens[s]`` to sequence ``s``, and return what each of them attends to.

        All sequences get the same number of tokens, at least one; only in the area "padding" the first call
        has different numbers.
        """
        raise NotImplementedError

    def crop(self, count: int) -> None:
        """Remove the last ``count`` tokens of every sequence."""
        raise NotSupportedError("crop: not offered")

    def draft(self) -> None:
        """Announce that tokens of the next ``feed`` may be removed by a ``crop`` directly after it."""

    def select(self, rows: Sequence[int]) -> None:
        """Replace sequence i by the previous sequence ``rows[i]``; the number of sequences may change."""
        raise NotSupportedError("select: not offered")

    def join(self, other: Self) -> None:
        """Append the sequences of ``other``, which is not used afterwards."""
        raise NotSupportedError("join: not offered")

    def copy(self) -> Self:
        """An independent copy."""
        raise NotSupportedError("copy: not offered")

    def save(self) -> Self:
        """A driver of a new cache, loaded from a saved copy of this one."""
        raise NotSupportedError("save: not offered")


Make = Callable[[Span, int], CacheDriver]


def keys_and_values(tokens: Tokens) -> tuple[np.ndarray, np.ndarray]:
    """Float32 (sequences, heads 1, tokens, DIM) each; shorter rows are padded on the left with token 0.

    A key repeats the bits of its token as -1 and 1; a value has the opposite signs.
    """
    length = max(map(len, tokens))
    padded = np.array([[0] * (length - len(row)) + list(row) for row in tokens])
    bits = padded[:, None, :, None] >> np.arange(DIM) % _BITS & 1
    keys = (2 * bits - 1).astype(np.float32)
    return keys, -keys


def attended(keys: Any, values: Any, mask: Any, tokens: Tokens) -> Seen:
    """What the queries of ``tokens`` see.

    ``keys``, ``values``: (sequences, heads, history, DIM), as passed to attention. ``mask``: true where a
    query sees a row, broadcast to (sequences, heads, queries, history); None if each query sees all rows
    except those of later tokens. A row whose key and value belong to different tokens is reported as such.
    """
    names = [_read(np.asarray(keys), np.asarray(values), row) for row in range(len(tokens))]
    count, history = max(map(len, tokens)), len(names[0])
    causal = np.arange(history) <= np.arange(count)[:, None] + history - count
    visible = np.broadcast_to(causal if mask is None else np.asarray(mask), (len(tokens), 1, count, history))[
        :, 0
    ]
    return [
        [
            [name for name, seen in zip(names[row], visible[row, query], strict=True) if seen]
            for query in range(count - len(token_row), count)
        ]
        for row, token_row in enumerate(tokens)
    ]


def _read(keys: np.ndarray, values: np.ndarray, row: int) -> list[Any]:
    """The token of each row of the history; the tokens of key and value if they differ."""
    weights = 1 << np.arange(_BITS)
    key, value = (
        ((side[row, 0].astype(np.float32).reshape(-1, DIM // _BITS, _BITS).sum(1) > 0) @ weights).tolist()
        for side in (keys, -values)
    )
    return [a if a == b else f"key {a} with value {b}" for a, b in zip(key, value, strict=True)]


# Traces: lists of calls that are made from a seed, as ("feed", (1, 3)) and ("crop", 2).

Op = tuple[str, Any]


def _trace(area: str, seed: int) -> tuple[int, list[Op]]:
    rnd = random.Random(seed)
    rows = rnd.randint(2, 3) if area in ("batch", "padding", "select") else 1
    count, ops = rows, list[Op]()
    while len(ops) < rnd.randint(4, 12):
        length = rnd.choice((1, 1, 1, 2, 3, 5))
        if area == "padding" and not ops:
            ops.append(("feed", tuple(rnd.randint(1, 6) for _ in range(count))))
        else:
            ops.append(("feed", (length,) * count))
        if area == "select" and rnd.random() < 0.5:
            chosen = tuple(rnd.choices(range(count), k=rnd.randint(1, 3)))
            ops.append(("select", chosen))
            count = len(chosen)
        elif area == "draft" and rnd.random() < 0.5:
            drafted = rnd.randint(1, 4)
            ops.append(("draft", (drafted, rnd.randint(1, drafted))))
        elif area == "join" and count < 4 and rnd.random() < 0.5:
            ops.append((area, rnd.randint(1, 7)))
            count += 1
        elif area in ("crop", "copy", "save") and rnd.random() < 0.5:
            ops.append((area, rnd.randint(1, 6)))
    return rows, ops


class _WrongError(Exception):
    """An answer differs from that of the model."""


class _Play:
    """A driver and its model, called together."""

    def __init__(self, make: Make, span: Span, rows: int) -> None:
        self.driver, self.span = make(span, rows), span
        self.model: list[list[int]] = [[] for _ in range(rows)]
        self.next = 1
        self.done: list[str] = []
        self.refusals: list[str] = []

    def run(self, ops: Sequence[Op]) -> None:
        for name, argument in ops:
            if name == "feed" and len(argument) == len(self.model):
                self.feed(argument)
            elif name == "draft":
                self.draft(*argument)
            elif name == "crop" and (count := min(argument, min(map(len, self.model)) - 1)) > 0:
                if self.asked(f"crop {count}", partial(self.driver.crop, count)):
                    self.model = [row[:-count] for row in self.model]
            elif name == "select" and max(argument) < len(self.model):
                if self.asked(f"select {argument}", partial(self.driver.select, argument)):
                    self.model = [list(self.model[row]) for row in argument]
            elif name == "join":
                self.join(argument)
            elif name in ("copy", "save"):
                self.other(name, bool(argument % 2))

    def feed(self, lengths: Sequence[int]) -> None:
        if max(map(len, self.model)) + max(lengths) > LONGEST:
            return
        fresh: list[list[int]] = []
        for count in lengths:
            fresh.append([*range(self.next, self.next + count)])
            self.next += count
        fed = [f"{row[0]}" if len(row) == 1 else f"{row[0]}..{row[-1]}" for row in fresh]
        self.done.append(f"feed {', '.join(fed)}")
        try:
            seen = self.driver.feed(fresh)
        except Exception as error:
            raise _WrongError(f"{type(error).__name__}: {error}".partition("\n")[0]) from error
        for row, new in enumerate(fresh):
            before = len(self.model[row])
            self.model[row] += new
            for i, token in enumerate(new):
                right, attended_to = self.model[row][self.span.of(before + i)], seen[row][i]
                if sorted(attended_to, key=str) != sorted(right, key=str):
                    raise _WrongError(f"token {token} attends to {attended_to}, not to {right}")

    def draft(self, count: int, rejected: int) -> None:
        self.done.append("draft")
        self.driver.draft()
        before = [len(row) for row in self.model]
        self.feed((count,) * len(self.model))
        if [len(row) - count for row in self.model] == before and self.asked(
            f"crop {rejected}", lambda: self.driver.crop(rejected)
        ):
            self.model = [row[:-rejected] for row in self.model]

    def join(self, length: int) -> None:
        """Join a new sequence of ``length`` tokens."""
        another = _Play(type(self.driver), self.span, 1)
        another.next = self.next
        another.feed((length,))
        self.next = another.next
        if self.asked(f"join another: {another.done[0]}", lambda: self.driver.join(another.driver)):
            self.model += another.model

    def other(self, name: str, goes_on: bool) -> None:
        """Feed a copy; continue with it if ``goes_on``, else check that the original is unchanged."""
        made: list[CacheDriver] = []
        if not self.asked(name, lambda: made.append(getattr(self.driver, name)())):
            return
        driver, model = self.driver, [list(row) for row in self.model]
        self.driver = made[0]
        if not goes_on:
            self.done.append(f"into the {name}:")
            self.feed((1,) * len(self.model))
            self.done.append("into the original:")
            self.driver, self.model = driver, model

    def asked(self, description: str, call: Callable[[], Any]) -> bool:
        """Whether the cache executed the call; a refusal is recorded."""
        self.done.append(description)
        try:
            call()
        except Exception as error:
            self.refusals.append(f"{type(error).__name__}: {error}".partition("\n")[0])
            self.done[-1] += " (refused)"
            return False
        return True


@dataclass(frozen=True)
class Outcome:
    """The outcome of one area: "passes", "refuses" (raises for some calls, but is never wrong), "fails" or
    "absent".

    ``why``: the shortest failing trace and its error, or the message of a refusal.
    """

    area: str
    result: str
    why: str = ""
    wrong: int = 0
    traces: int = 0


_METHODS = {
    "draft": "crop", "crop": "crop", "select": "select", "join": "join", "copy": "copy", "save": "save",
}  # fmt: skip


def check_area(driver: type[CacheDriver], span: Span, area: str, traces: int = TRACES) -> Outcome:
    """The outcome of ``traces`` random traces of one area."""
    method = _METHODS.get(area, "feed")
    offered = getattr(driver, method) is not getattr(CacheDriver, method)
    if area in driver.absent:
        return Outcome(area, "absent")
    if not offered:
        return Outcome(
            area, "fails", f"{driver.__name__} has no {method}, and does not declare {area} absent"
        )
    wrong: list[tuple[int, list[Op]]] = []
    refusals: list[str] = []
    for seed in range(traces):
        rows, ops = _trace(area, seed)
        play = _Play(driver, span, rows)
        try:
            play.run(ops)
        except _WrongError:
            wrong.append((rows, ops))
        refusals += play.refusals
    if wrong:
        why = min((_shrunk(driver, span, rows, ops) for rows, ops in wrong[:8]), key=len)
        return Outcome(area, "fails", why, len(wrong), traces)
    result = "refuses" if refusals else "passes"
    return Outcome(area, result, max(set(refusals), key=refusals.count, default=""), 0, traces)


def _shrunk(make: Make, span: Span, rows: int, ops: list[Op]) -> str:
    """A minimal list of calls that still fails, and its error."""

    def goes_wrong(tried: list[Op]) -> str:
        play = _Play(make, span, rows)
        try:
            play.run(tried)
        except _WrongError as error:
            return f"{'; '.join(play.done)}: {error}"
        return ""

    tried, why = True, goes_wrong(ops)
    while tried:
        tried = False
        for i, (name, argument) in enumerate(ops):
            less = [ops[:i] + ops[i + 1 :]]
            if name == "feed" and max(argument) > 1:
                less.append([*ops[:i], (name, tuple(max(1, n - 1) for n in argument)), *ops[i + 1 :]])
            for candidate in less:
                if failure := goes_wrong(candidate):
                    ops, why, tried = candidate, failure, True
                    break
            if tried:
                break
    return why


def check(driver: type[CacheDriver], span: Span, traces: int = TRACES) -> list[Outcome]:
    """The outcome of every area of ``AREAS``."""
    return [check_area(driver, span, area, traces) for area in AREAS]


class DrivenTests:
    """Subclass it with a ``driver``; ``span`` describes what a query sees in its cache."""

    driver: ClassVar[type[CacheDriver]]
    span: ClassVar[Span] = Span()
    traces: ClassVar[int] = TRACES

    @pytest.mark.parametrize("area", AREAS)
    def test_random_traces_agree_with_lists_of_tokens(self, area: str) -> None:
        outcome = check_area(self.driver, self.span, area, self.traces)
        if outcome.result == "absent":
            pytest.skip(f"declared absent: {area}")
        assert outcome.result != "fails", f"{outcome.wrong} of {outcome.traces} traces: {outcome.why}"
