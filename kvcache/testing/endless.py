"""A very long run through a small window: memory, cells and time per token stay flat.

From the shell::

    python -m kvcache.testing.endless --backend numpy --tokens 1000000 --window 1024
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import ml
from kvcache import Batch, SlidingWindowCache
from ml import DType

__all__ = ["Stretch", "run"]

HEADS, DIM, PROMPT = 2, 16, 512


@dataclass(frozen=True)
class Stretch:
    """One part of the run: what is held at its end, and what a token cost in it."""

    tokens: int
    cells: int
    buffer_bytes: int
    backend_bytes: int
    micros: float
    """Processor time of a pass with one token: start_forward, put, get, in one layer."""


def run(backend: ml.Backend, tokens: int, window: int, parts: int = 10) -> Iterator[Stretch]:
    """Decode ``tokens`` tokens, one a pass, after a prompt; a line for each of ``parts`` stretches."""
    cache = SlidingWindowCache(window)
    cache.init(backend, DType.F16, 1, tokens + PROMPT, PROMPT)
    with backend.new_context() as ctx:
        prompt, one = (ctx.zeros((count, HEADS, DIM), DType.F16) for count in (PROMPT, 1))
        cache.start_forward(ctx, Batch(range(PROMPT), [0] * PROMPT))
        cache.put(ctx, prompt, prompt)
        position = PROMPT
        for part in range(parts):
            stop = PROMPT + tokens * (part + 1) // parts
            began, first = time.process_time(), position
            while position < stop:
                cache.start_forward(ctx, Batch([position], [0]))
                cache.put(ctx, one, one)
                cache.get(ctx)
                position += 1
            spent = (time.process_time() - began) / max(1, stop - first)
            yield Stretch(
                position, cache.cells, cache.nbytes, backend.memory().allocated, round(spent * 1e6, 1)
            )
    cache.close()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvcache.testing.endless", description=__doc__)
    parser.add_argument("--backend", default="numpy")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--window", type=int, default=1024)
    args = parser.parse_args(argv)
    found = []
    with ml.open_backend(args.backend) as backend:
        sys.stdout.write("   tokens  cells  buffer bytes  backend bytes  us per token\n")
        for part in run(backend, args.tokens, args.window):
            found.append(part)
            sys.stdout.write(
                f"{part.tokens:9d}  {part.cells:5d}  {part.buffer_bytes:12d}  {part.backend_bytes:13d}  "
                f"{part.micros:12.1f}\n"
            )
            sys.stdout.flush()
    flat = len({(part.cells, part.buffer_bytes) for part in found}) == 1
    flat = flat and max(part.backend_bytes for part in found) <= 1.01 * found[0].backend_bytes
    sys.stdout.write("flat\n" if flat else "NOT FLAT\n")
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())
