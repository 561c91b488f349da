"""What a caller waits for when snapshots leave the device, and when a recurrent state is kept.

::

    python -m benchmarks.page_out [--backends numpy torch mlx] [--device cuda]

Interleaved rounds in one process; milliseconds, median [10th, 90th percentile].
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import ml
from benchmarks.pages import milliseconds, show
from benchmarks.timing import machine
from kvcache import Batch, CausalCache, HostTier, PrefixCache, PrefixOptions, RecurrentCache
from kvcache.testing.bench import Contender, interleave
from ml import DType

LAYERS, HEADS, DIM = 4, 8, 128
STATES, STATE = 12, (16, 128, 128)
"""Recurrent layers, and the shape of one's state."""


class Leaving:
    """A conversation of ``tokens`` that has just ended, and has to leave the device."""

    def __init__(self, backend: ml.Backend, tokens: int, dtype: DType, in_flight: int) -> None:
        self.backend, self.tokens, self.dtype, self.in_flight = backend, tokens, dtype, in_flight
        with backend.new_context() as ctx:
            self.rows = ctx.full((tokens, HEADS, DIM), 1.5, dtype)
            ctx.compute(self.rows)
        self.cache = CausalCache()
        self.cache.init(backend, dtype, 1, tokens, tokens)

    def fill(self) -> None:
        self.prefix = PrefixCache(
            self.cache, tiers=[HostTier()], options=PrefixOptions(in_flight=self.in_flight)
        )
        self.evaluate(list(range(self.tokens)))

    def evaluate(self, prompt: list[int]) -> None:
        tokens = self.tokens
        with self.prefix.begin(prompt) as session, self.backend.new_context() as ctx:
            self.cache.start_forward(ctx, Batch(range(tokens), [session.seq] * tokens))
            for layer in range(LAYERS):
                self.cache.set_layer(layer)
                self.cache.put(ctx, self.rows, self.rows)
            ctx.compute(self.cache.get(ctx)[0])
            self.cache.get(ctx)[0].slice(ctx, 0, 0, 1).to_numpy()  # all of it is done by now

    def page_out(self) -> None:
        """As when cells or budget run out: nothing is waited for that need not be."""
        tree = self.prefix.tree
        while (node := tree.device.first()) is not None:
            tree.offload(node)

    def wait(self) -> None:
        self.page_out()
        self.prefix.flush()

    def back(self) -> None:
        """Into a new session, but for the last token, which is always computed."""
        with self.prefix.begin(list(range(self.tokens))) as session, self.backend.new_context() as ctx:
            assert session.cached == self.tokens - 1
            ctx.compute()

    def done(self) -> None:
        self.prefix.flush()
        assert self.prefix.failed["host"] == 0 < self.prefix.nbytes["host"]
        self.prefix.close()


class LeavingForFull(Leaving):
    """Host memory is full, as after a while: a conversation that leaves takes the place of an older one."""

    def __init__(self, backend: ml.Backend, tokens: int, dtype: DType) -> None:
        super().__init__(backend, tokens, dtype, 1 << 40)
        page = tokens * (2 * LAYERS * HEADS * DIM * dtype.itemsize + np.dtype(np.int64).itemsize)
        self.prefix = PrefixCache(self.cache, tiers=[HostTier(3 * page)])
        self.filled = 0

    def fill(self) -> None:
        self.filled += 1
        self.evaluate([self.filled] * self.tokens)


def paging_out(backend: ml.Backend, tokens: int, dtype: DType) -> dict[str, Contender]:
    full = LeavingForFull(backend, tokens, dtype)
    for _ in range(4):
        full.fill()
        full.wait()
    given = np.ones(2 * LAYERS * tokens * HEADS * DIM * dtype.itemsize, np.uint8)
    taken = np.ones_like(given)
    found = {"memcpy": Contender(lambda: np.copyto(taken, given)), "leaving": Contender(full.wait, full.fill)}
    if any(device.kind != "cpu" for device in backend.devices):
        here, there = (Leaving(backend, tokens, dtype, in_flight) for in_flight in (0, 1 << 40))
        found["leaving, by the caller"] = Contender(here.page_out, here.fill, here.done)
        found["leaving, what the caller waits for"] = Contender(there.page_out, there.fill, there.done)
    return found


class Turn:
    """The end of a turn and the beginning of the next: a state is kept, and gone on from."""

    def __init__(self, backend: ml.Backend, at_once: bool) -> None:
        self.backend, self.at_once = backend, at_once
        self.cache = RecurrentCache((1,), STATE, checkpoints=0)
        self.cache.init(backend, DType.F32, 2, 64, 8)

    def begin(self) -> None:
        self.cache.remove(0, 0)
        self.step(0)

    def step(self, position: int) -> None:
        with self.backend.new_context() as ctx:
            self.cache.start_forward(ctx, Batch([position], [0]))
            for layer in range(STATES):
                self.cache.set_recurrent_state(ctx, layer, ctx.full((1, *STATE), 1.0 + position, DType.F32))
            ctx.compute(*(self.cache.recurrent_state(ctx, layer) for layer in range(STATES)))

    def turn(self) -> None:
        snapshot = self.cache.snapshot(0)
        if self.at_once:
            snapshot.detach()
        self.cache.remove(0, 0)
        assert self.cache.restore(0, snapshot)
        self.step(1)

    def let_go(self) -> None:
        snapshot = self.cache.snapshot(0)
        if self.at_once:
            snapshot.detach()
        del snapshot
        self.step(1)


def turns(backend: ml.Backend) -> dict[str, Contender]:
    found = {}
    for name, at_once in (("copied when it is taken", True), ("copied when its slot is written", False)):
        kept, lost = Turn(backend, at_once), Turn(backend, at_once)
        found[f"restored, {name}"] = Contender(kept.turn, kept.begin)
        found[f"let go, {name}"] = Contender(lost.let_go, lost.begin)
    return found


def out_or_aside(backend: ml.Backend) -> dict[str, Contender]:
    """Two ways to keep a slot's states: copy them out, or move the sequence that is about to write them."""
    with backend.new_context() as ctx:
        buffers = [ctx.zeros((4, *STATE), DType.F32) for _ in range(STATES)]
        ctx.compute(*buffers)
    kept: list[Any] = []

    def copy_out() -> None:
        with backend.new_context() as ctx:
            kept[:] = [buffer.slice(ctx, 0, 1, 2).contiguous(ctx) for buffer in buffers]
            ctx.compute(*kept)

    def move() -> None:
        with backend.new_context() as ctx:
            found = [(buffer, buffer.rows(ctx, np.array([1]))) for buffer in buffers]
            ctx.forward(*(buffer.set_rows(ctx, rows, np.array([2])) for buffer, rows in found))
            ctx.compute(*buffers)

    return {"copied out": Contender(copy_out), "moved to a spare slot": Contender(move)}


def measure(backend: ml.Backend, name: str, tokens: int, rounds: int) -> None:
    size = 2 * LAYERS * tokens * HEADS * DIM * 4 / 1e6
    parts: Sequence[tuple[str, Callable[[], dict[str, Contender]]]] = (
        (f"{tokens} tokens in F32, {size:,.0f} MB, leave", lambda: paging_out(backend, tokens, DType.F32)),
        (
            f"{tokens} tokens in F16, {size / 2:,.0f} MB, leave",
            lambda: paging_out(backend, tokens, DType.F16),
        ),
        (
            f"a state of {STATES * np.prod(STATE) * 4 / 1e6:,.1f} MB, kept and gone on from",
            lambda: turns(backend),
        ),
        ("the same state, in one of two ways", lambda: out_or_aside(backend)),
    )
    for title, make in parts:
        found = interleave(make(), rounds, warmup=2, own_threads=False).samples()
        print(f"\n## {name}: {title}\n")
        rows = ((way, milliseconds(sample), f"{sample.ratio:.2f}") for way, sample in found.items())
        show(("", "milliseconds", "x first row"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backends", nargs="+", default=["numpy", "torch", "mlx"])
    parser.add_argument("--device", help="of the backends: cuda, say")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    print(f"# Leaving the device\n\n{machine()}; {options.rounds} rounds.")
    for name in options.backends:
        with ml.open_backend(name, **({"device": options.device} if options.device else {})) as backend:
            measure(backend, name, options.tokens, options.rounds)


if __name__ == "__main__":
    main()
