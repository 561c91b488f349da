"""What is measured on every framework alike: sizes and dtypes of put and get, and of attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import ml
from benchmarks.shapes import DIM, DTYPES, HEADS, LENGTHS, WINDOW
from kvcache import Batch, CausalCache
from kvcache.bench.timing import Contender, Trial, interleave, joined

__all__ = ["DRAWS", "EACH", "SEQUENCES", "Attended", "PutGet", "attention", "drawn", "filled", "put_get"]

DRAWS = 6
"""How often a chunk's buffers are made anew: what it moves, 2 or 4 MiB a layer, stays in the processor's
caches, and where in memory it lies makes two floors that do the same differ by a third."""

SEQUENCES, EACH = 8, 4096
"""Sequences that are attended to at once, and tokens of each."""


@dataclass(frozen=True, slots=True)
class PutGet:
    """A step that puts ``new`` tokens after ``history``; ``grow`` and ``window`` as Decoding has them."""

    name: str
    dtype: str
    history: int
    new: int
    grow: bool = True
    window: int = 0

    @property
    def shape(self) -> tuple[int, int, int, int, str, bool, int]:
        """As floors and peers take it."""
        return self.history, self.new, HEADS, DIM, self.dtype, self.grow, self.window

    @property
    def decoding(self) -> tuple[int, int, ml.DType, bool, int]:
        """As Decoding takes it, after the backend."""
        return self.history, self.new, DTYPES[self.dtype], self.grow, self.window


def put_get(quick: bool) -> Iterator[PutGet]:
    for dtype in DTYPES:
        for history in (128, 8192) if quick else LENGTHS:
            yield PutGet(f"put + get, 1 token, {history}", dtype, history, 1)
        if not quick:
            yield PutGet(f"put + get, 1 token, window {WINDOW}, 32768", dtype, 32768, 1, window=WINDOW)
        yield PutGet("put + get, 512 tokens, 8192", dtype, 8192, 512, grow=False)


def drawn(
    case: PutGet,
    make: Callable[[], dict[str, Contender]],
    rounds: int,
    floors: Sequence[str],
    seconds: float,
    own_threads: bool = True,
) -> tuple[Trial, dict[str, Contender]]:
    """``rounds`` of the contenders that ``make`` gives, a chunk's in DRAWS parts; and the last of them."""
    draws = DRAWS if case.new > 1 else 1
    contenders: dict[str, Contender] = {}
    trials: list[Trial] = []
    for _ in range(draws):
        contenders.clear()  # and their buffers
        contenders = make()
        trials.append(
            interleave(contenders, rounds // draws, floors=floors, seconds=seconds, own_threads=own_threads)
        )
    return joined(trials, floors), contenders


@dataclass(frozen=True, slots=True)
class Attended:
    """Attention of one query over ``history`` tokens; None: of SEQUENCES queries over EACH."""

    dtype: str
    history: int | None
    rounds: int


def attention(quick: bool) -> Iterator[Attended]:
    for dtype in DTYPES:
        for history in (1024,) if quick else (1024, 8192, 32768):
            yield Attended(dtype, history, 20 if quick else 60 if history < 32768 else 20)
        yield Attended(dtype, None, 3 if quick else 12)


def filled(backend: ml.Backend, sequences: int, each: int, dtype: ml.DType) -> tuple[CausalCache, Any]:
    """A cache of ``sequences`` with random tokens, in a pass of one further token each; its context."""
    ctx, cache, random = backend.new_context(), CausalCache(), np.random.default_rng(0)
    # Room beyond the history: what get returns is then strided, as it is in a decoding cache.
    cache.init(backend, dtype, sequences, each + 256, 512)

    def put(positions: range | list[int], owners: list[int]) -> None:
        host = random.normal(size=(len(owners), HEADS, DIM)).astype(np.float32)
        part = ctx.from_numpy(host).cast(ctx, dtype)
        cache.start_forward(ctx, Batch(positions, owners))
        cache.put(ctx, part, part)
        ctx.compute()

    for seq in range(sequences):
        for begin in range(0, each - 1, 512):
            count = min(512, each - 1 - begin)
            put(range(begin, begin + count), [seq] * count)
    put([each - 1] * sequences, list(range(sequences)))
    return cache, ctx
