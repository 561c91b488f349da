"""``python -m benchmarks.census {mlx-lm,transformers} ...``: each has a module and options of its own."""

from __future__ import annotations

import importlib
import sys

RUNTIMES = {"mlx-lm": "mlx_lm", "transformers": "transformers"}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in RUNTIMES:
        raise SystemExit(f"usage: python -m benchmarks.census {{{','.join(RUNTIMES)}}} [--help]")
    module = importlib.import_module(f"benchmarks.census.{RUNTIMES[sys.argv[1]]}")
    raise SystemExit(module.main(sys.argv[2:]))
