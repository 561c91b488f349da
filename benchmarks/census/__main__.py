"""A library's models with our caches, mode by mode, against its own caches and against no cache at all.

    python -m benchmarks.census {mlx-lm,transformers,mlx-lm-engine,transformers-engine} [--type NAME ...]
                                [--mode NAME ...] [--results FILE] [--render]

Every type that writes text is built small with random weights, and runs in a process of its own. Types that
the results have already are not run again. ``--render`` writes the table of docs/*-models.md from them.
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path

from benchmarks.census import engine


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.census", description=__doc__)
    parser.add_argument("library", choices=["mlx-lm", "transformers", "mlx-lm-engine", "transformers-engine"])
    parser.add_argument("--type", action="append", default=[], help="only this type; repeatable")
    parser.add_argument("--mode", action="append", default=[], help="only this mode; repeatable")
    parser.add_argument("--results", type=Path, help="a JSON file that keeps what was found")
    parser.add_argument("--render", action="store_true", help="write the table into the docs")
    options = parser.parse_args(arguments)
    library = importlib.import_module(f"benchmarks.census.{options.library.replace('-', '_')}")
    if options.mode:
        library.MODES = {mode: library.MODES[mode] for mode in options.mode}
    results = {}
    if options.results is not None and options.results.exists():
        results = json.loads(options.results.read_text(encoding="utf-8"))
    engine.all_of(library, options.type, results, options.results)
    if options.render:
        engine.render(library, results)
    verdicts = [verdict for found in results.values() if "" not in found for verdict in found.values()]
    return int(any(kind == "wrong" for kind, _ in verdicts))


if __name__ == "__main__":
    raise SystemExit(main())
