"""What passes where, from the suites' own results: a Markdown table for each area of the contract.

::

    python -m ml.testing.table --ml-backends numpy,torch,mlx > conformance.md

runs the suites on each backend in a process of its own. ``--results FOLDER`` keeps what each run
reports (``NAME.jsonl``) and takes a report that is there in place of a run, so that backends of
several machines come into one table; a run that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from ml.testing.results import NO_TESTS, Result, Run, Selection, installed_suites, load, run_suites

__all__ = ["main", "render"]

OUTCOMES = ("pass", "absent", "n/a", "FAIL")
_MANY = 8
"""More pairs of dtypes than this in one row are counted, not named."""


# Runs.


def _runs(names: Sequence[str], suites: Sequence[str], folder: Path) -> list[Run]:
    for name in names:
        path = folder / f"{name}.jsonl"
        if path.exists() and not load(path).unfinished:
            continue
        if run_suites(name, path, Selection(suites)) == NO_TESTS:
            path.unlink()
            raise RuntimeError(f"{name}: pytest found no test to run in {', '.join(suites)}")
    return [load(folder / f"{name}.jsonl") for name in names]


# Markdown.


def render(runs: Sequence[Run], command: str) -> str:
    """The whole page."""
    areas = list(dict.fromkeys(result.area for run in runs for result in run.results))
    parts = [_HEAD.format(command=command, versions=", ".join(run.title for run in runs))]
    parts += ["## By area\n", _summary(runs, areas, "area")]
    dtypes = [name for name in _NAMES if any(_has(result, name) for run in runs for result in run.results)]
    parts += [
        "## By dtype\n",
        _summary(runs, dtypes, "dtypes"),
        "## Tests that were not run\n",
        _reasons(runs),
    ]
    parts += [part for area in areas for part in (f"## {area}\n", _area(runs, area))]
    return "\n".join(parts)


_NAMES = ("F32", "F16", "BF16", "I8", "U8", "I32", "I64", "BOOL", "Q8_0", "Q4_0")
_HEAD = """# What passes where

Written by a machine from the results of the shipped suites; do not edit. To make it again:

```console
$ {command}
```

{versions}.

A cell counts tests: those that **pass**, those skipped because the backend declares the operation or
dtype **absent** (another test checks that it then refuses), those that ask nothing of this backend
(**n/a**), and those that **FAIL**. A row without an operation or dtype is of tests that choose their
own. Operations or dtypes in one row have the same outcome; where one differs, it has a row.
"""


def _has(result: Result, name: str) -> bool:
    return name in result.dtypes.split("-")


def _summary(runs: Sequence[Run], rows: Sequence[str], field: str) -> str:
    lines = _table([field.removesuffix("s"), *(run.title for run in runs)])
    for name in rows:
        counts = [
            Counter(
                result.outcome
                for result in run.results
                if (_has(result, name) if field == "dtypes" else result.area == name)
            )
            for run in runs
        ]
        lines.append(_row([name, *map(_cell, counts)]))
    totals = [Counter(result.outcome for result in run.results) for run in runs]
    return "\n".join([*lines, *([_row(["all", *map(_cell, totals)])] if field == "area" else []), ""])


def _reasons(runs: Sequence[Run]) -> str:
    lines = _table(["reason", *(run.title for run in runs)])
    found = [Counter(one.reason for one in run.results if one.outcome in ("absent", "n/a")) for run in runs]
    for reason in sorted({reason for counts in found for reason in counts}):
        lines.append(_row([reason, *(str(counts[reason] or "") for counts in found)]))
    return "\n".join([*lines, ""])


def _area(runs: Sequence[Run], area: str) -> str:
    """Tests in the order of the suite. What has the same outcome everywhere shares a row."""
    tests: dict[str, dict[tuple[str, str], list[Counter[str]]]] = {}
    for i, run in enumerate(runs):
        for one in (result for result in run.results if result.area == area):
            parts = tests.setdefault(one.test, {})
            parts.setdefault((one.operation, one.dtypes), [Counter() for _ in runs])[i][one.outcome] += 1
    lines = _table(["test", "operation", "dtype", *(run.name for run in runs)])
    for test, parts in tests.items():
        for group in _alike(parts):
            sums = [sum((parts[part][i] for part in group), Counter()) for i in range(len(runs))]
            operations = " ".join(dict.fromkeys(f"`{operation}`" for operation, _ in group if operation))
            dtypes = _listed(list(dict.fromkeys(dtype for _, dtype in group)))
            lines.append(_row([_words(test), operations, dtypes, *map(_cell, sums)]))
    return "\n".join([*lines, ""])


def _alike(parts: Mapping[tuple[str, str], Sequence[Counter[str]]]) -> list[list[tuple[str, str]]]:
    """Operations and dtypes with the same outcomes: dtypes of one operation, or operations without one."""
    groups: dict[tuple[object, ...], list[tuple[str, str]]] = {}
    for (operation, dtypes), counts in parts.items():
        key = (operation if dtypes else "", bool(dtypes), *(frozenset(count) for count in counts))
        groups.setdefault(key, []).append((operation, dtypes))
    return list(groups.values())


def _words(test: str) -> str:
    return test.removeprefix("test_").replace("_", " ")


def _listed(names: Sequence[str]) -> str:
    """Pairs are named where they are few, else counted; single dtypes are always named."""
    pairs = sum("-" in name for name in names)
    return f"{pairs} pairs" if pairs > _MANY else " ".join(names).strip()


def _cell(counts: Counter[str]) -> str:
    shown = [f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome]]
    return ", ".join(f"**{text}**" if text.endswith("FAIL") else text for text in shown) or "-"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _table(headings: Sequence[str]) -> list[str]:
    return [_row(headings), f"|{'---|' * len(headings)}"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the page. Exit code 1 when a test failed somewhere."""
    parser = argparse.ArgumentParser(prog="python -m ml.testing.table", description="What passes where.")
    parser.add_argument("--ml-backends", required=True, metavar="NAMES", help="with commas between them")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="keep reports there, and use them")
    given = parser.parse_args(arguments)
    names = given.ml_backends.split(",")
    suites = installed_suites()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.results or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        runs = _runs(names, suites, folder)
    sys.stdout.write(render(runs, f"python -m ml.testing.table --ml-backends {','.join(names)}"))
    return int(any(result.outcome == "FAIL" for run in runs for result in run.results))


if __name__ == "__main__":
    sys.exit(main())
