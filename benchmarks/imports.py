"""How long the imports take, beyond Python's own start, and that the NumPy path loads no framework."""

from __future__ import annotations

import functools
import statistics
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.report import Row, summary
from kvcache.testing.bench import Contender, interleave

_NUMPY_PATH = """
import sys, ml, kvcache
backend = ml.open_backend("numpy")
cache = kvcache.CausalCache()
cache.init(backend, ml.DType.F32, 1, 8, 8)
assert not {"torch", "mlx", "cupy", "jax", "transformers"} & set(sys.modules)
"""


def run(quick: bool, _: str) -> Iterator[Row]:
    codes = {"import ml": "import ml", "import kvcache": "import kvcache", "a cache on NumPy": _NUMPY_PATH}
    contenders = {
        name: Contender(functools.partial(subprocess.run, [sys.executable, "-c", code], check=True))
        for name, code in {"nothing": "pass", **codes}.items()
    }
    trial = interleave(contenders, 3 if quick else 9, warmup=1, own_threads=False)
    base = trial.sample("nothing").median
    for name in codes:
        beyond = [(value - base) / 1e3 for value in trial.times[name]]
        target = 1.0 if name in ("import ml", "import kvcache") else None
        yield summary(
            "imports", name, "ours", beyond, ratio=statistics.median(beyond) / 200, unit="ms",
            dropped=trial.dropped, target=target, note="ratio to 0.2 s",
        )  # fmt: skip
