"""A library's models with our caches, mode by mode, against its own caches and against no cache at all.

    python -m benchmarks.census {mlx-lm,transformers,mlx-lm-engine,transformers-engine} [--type NAME ...]
                                [--mode NAME ...] [--results FILE]
    python -m benchmarks.census LIBRARY --render [FILE ...]
    python -m benchmarks.census LIBRARY --table [FILE ...]

Every type that writes text is built small with random weights, and runs in a process of its own. Types that
FILE has already are not run again. ``--render`` and ``--table`` run nothing: the first puts what such files
have into the record (docs/benchmarks/census/LIBRARY.json), and the record's tables into docs/models.md; the
second prints every type with every mode, of these files or else of the record.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from benchmarks.census import engine, page
from benchmarks.pages import fill, load


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.census", description=__doc__)
    parser.add_argument("library", choices=["mlx-lm", "transformers", "mlx-lm-engine", "transformers-engine"])
    parser.add_argument("--type", action="append", default=[], help="only this type; repeatable")
    parser.add_argument("--mode", action="append", default=[], help="only this mode; repeatable")
    parser.add_argument("--results", type=Path, metavar="FILE", help="a JSON file that keeps what was found")
    parser.add_argument("--render", type=Path, nargs="*", metavar="FILE", help="write record and page")
    parser.add_argument("--table", type=Path, nargs="*", metavar="FILE", help="print all that was found")
    options = parser.parse_args(arguments)
    record = page.RECORDS / f"{options.library}.json"
    if options.render is not None:
        results = page.merged(load(record), map(load, options.render))
        page.keep(results, record)
        fill(page.PAGE, page.tables(options.library, results))
    elif options.table is not None:
        print(page.whole(page.merged({}, map(load, options.table or [record]))))
    else:
        return run(options)
    return 0


def run(options: argparse.Namespace) -> int:
    library = importlib.import_module(f"benchmarks.census.{options.library.replace('-', '_')}")
    if options.mode:
        library.MODES = {mode: library.MODES[mode] for mode in options.mode}
    results = {} if options.results is None else load(options.results)
    engine.all_of(library, options.type, results, options.results)
    verdicts = [verdict for found in results.values() if "" not in found for verdict in found.values()]
    return int(any(kind == "wrong" for kind, _ in verdicts))


if __name__ == "__main__":
    raise SystemExit(main())
