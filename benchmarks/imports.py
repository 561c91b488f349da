"""How long the imports take, beyond Python's own start, and that the NumPy path loads no framework."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks.report import Row

__all__ = ["run"]

_NUMPY_PATH = """
import sys, ml, kvcache
backend = ml.open_backend("numpy")
cache = kvcache.CausalCache()
cache.init(backend, ml.DType.F32, 1, 8, 8)
assert not {"torch", "mlx", "cupy", "jax", "transformers"} & set(sys.modules)
"""


def run(quick: bool, _: str) -> Iterator[Row]:
    rounds = 3 if quick else 9
    codes = {"import ml": "import ml", "import kvcache": "import kvcache", "a cache on NumPy": _NUMPY_PATH}
    times: dict[str, list[float]] = {name: [] for name in ("nothing", *codes)}
    for i in range(rounds + 1):
        for name, code in {"nothing": "pass", **codes}.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            if i:
                times[name].append((time.perf_counter() - start) * 1e6)
    base = statistics.median(times["nothing"])
    for name in codes:
        beyond = [value - base for value in times[name]]
        median = statistics.median(beyond)
        target = 1.0 if name in ("import ml", "import kvcache") else None
        yield Row(
            "imports", name, "ours", median / 1000, min(beyond) / 1000, max(beyond) / 1000,
            median / 200_000, "ms", rounds=rounds, target=target, note="ratio to 0.2 s",
        )  # fmt: skip
