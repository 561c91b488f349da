"""One decoding step, many times, on NumPy: to time two checkouts in turn, or to count what a step takes.

``PYTHONPATH=CHECKOUT python -P benchmarks/steps.py`` times that checkout's. Under ``valgrind
--tool=cachegrind --cache-sim=no``, two runs with different ``--steps`` differ by the instructions of the
steps between.
"""

from __future__ import annotations

import argparse
import statistics
import time

import ml
from kvcache import Batch, CausalCache, SlidingWindowCache

ROUND, PROMPT = 60, 512


def measure(options: argparse.Namespace) -> list[float]:
    """Microseconds of each step's part that is timed."""
    backend, count = ml.open_backend("numpy"), options.sequences
    cache = SlidingWindowCache(options.window) if options.window else CausalCache()
    cache.set_config(ml.CacheConfig(elide_mask=not options.masks))
    times = []
    with backend, backend.new_context() as ctx:
        cache.init(backend, ml.DType.F32, count, options.history + options.steps, PROMPT)
        prompt, new = (ctx.zeros((tokens, 1, 1), ml.DType.F32) for tokens in (PROMPT, count))
        for seq in range(count):
            for begin in range(0, options.history, PROMPT):
                cache.start_forward(ctx, Batch(range(begin, begin + PROMPT), [seq] * PROMPT))
                cache.put(ctx, prompt, prompt)
        for position in range(options.history, options.history + options.steps):
            batch = Batch([position] * count, list(range(count)))
            start = time.perf_counter()
            cache.start_forward(ctx, batch)
            begun = time.perf_counter()
            if options.timed == "plan":
                assert cache._pass is not None
                cache._pass.reading.shared(ctx)
            planned = time.perf_counter()
            for _ in range(options.puts):
                cache.put(ctx, new, new)
            stored = time.perf_counter()
            if options.timed == "get":
                cache.get(ctx)
            read = time.perf_counter() - stored
            times.append(
                {"start": begun - start, "plan": planned - begun, "get": begun - start + read}[options.timed]
            )
    return [seconds * 1e6 for seconds in times]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--history", type=int, default=2048, help=f"tokens of each, a multiple of {PROMPT}")
    parser.add_argument("--window", type=int, default=0, help="0: none")
    parser.add_argument("--masks", action="store_true", help="make masks that could be elided")
    parser.add_argument("--puts", type=int, default=1, help="how often a step's tokens are put")
    parser.add_argument("--steps", type=int, default=6000)
    what = "start_forward, what the first get plans and masks, or start_forward and the whole first get"
    parser.add_argument("--timed", choices=("start", "plan", "get"), default="start", help=what)
    times = measure(parser.parse_args())
    medians = [statistics.median(times[i : i + ROUND]) for i in range(0, len(times), ROUND)]
    print(f"fastest {ROUND} steps {min(medians):.1f} us, median of all {statistics.median(times):.1f} us")


if __name__ == "__main__":
    main()
