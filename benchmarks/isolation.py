"""Which contexts are kept apart on which face: the table of docs/prefix-cache.md, of the suite that shows it.

    python -m benchmarks.isolation                      # runs tests/isolation, which takes seconds
    .venv-sglang/bin/python -m benchmarks.isolation     # and what SGLang's own names add
    .venv-lmcache/bin/python -m benchmarks.isolation    # its names, and what its server finds
    .venv-vllm/bin/python -m benchmarks.isolation       # what its manager of tiers finds
    python -m benchmarks.isolation --show               # writes the table of what was recorded

A cell is there if its test has passed, with all that it was crossed with; one that failed ends the command.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.pages import DOCS, fill, load, save, table

RECORD = DOCS / "benchmarks" / "isolation.json"
PAGE = DOCS / "prefix-cache.md"
TESTS = Path(__file__).resolve().parent.parent / "tests"
HERE = f"{TESTS}/isolation"
_TIERS = ("device", "host", "folder", "names")


class Cells:
    """A plugin of pytest: what the tests of cells record, if they pass."""

    def __init__(self) -> None:
        self.found: list[list[Any]] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and report.passed:
            self.found += [value for name, value in report.user_properties if name == "cell"]


def suite() -> str:
    """The tests for the environment that this is run in."""
    for runtime in ("vllm", "sglang", "lmcache"):
        if importlib.util.find_spec(runtime) is not None:
            return f"{TESTS}/integrations/{runtime}/running/test_isolation.py"
    return HERE


def run() -> None:
    import pytest

    cells = Cells()
    warnings = [] if suite() == HERE else ["-W", "default"]  # runtimes warn as they are imported
    if code := pytest.main(["-q", "-p", "no:cacheprovider", *warnings, suite()], plugins=[cells]):
        sys.exit(int(code))
    record = load(RECORD)
    for face, dimension, tier, *crossed in cells.found:
        cell = record.setdefault(face, {}).setdefault(dimension, {})
        cell[tier] = crossed[0] if crossed else 0
    save(RECORD, record)


def rows(record: dict[str, Any], dimensions: dict[str, str], faces: list[Any]) -> Iterator[list[str]]:
    """By dimension what is shown for each face; a reason has a number, which ``reasons`` explains."""
    numbers = {reason: str(number) for number, reason in enumerate(reasons(faces), 1)}
    for dimension, said in dimensions.items():
        row = [said]
        for face in faces:
            cell = record.get(face.name, {}).get(dimension, {})
            shown = ", ".join(tier for tier in _TIERS if tier in cell).replace("device, host, folder", "all")
            if dimension in face.open:
                shown = f"**open** [{numbers[face.open[dimension]]}]"
            elif shown and dimension in face.told:
                shown += f" [{numbers[face.told[dimension]]}]"
            elif dimension in face.refused:
                shown = f"none [{numbers[face.refused[dimension]]}]"
            row.append(shown or "not run")
        yield row


def reasons(faces: list[Any]) -> list[str]:
    """Each once, in the order of the table's columns."""
    each = (some for face in faces for some in (face.refused, face.told, face.open))
    return [*dict.fromkeys(reason for some in each for reason in some.values())]


def shown() -> str:
    from tests.isolation.contexts import DIMENSIONS
    from tests.isolation.test_isolation import FACES

    record, faces = load(RECORD), [made.face for made in FACES]
    head = ["what differs", *(face.name for face in faces)]
    notes = "\n".join(f"{number}. {reason}." for number, reason in enumerate(reasons(faces), 1))
    return f"{table(head, rows(record, DIMENSIONS, faces))}\n\n{notes}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.isolation", description=__doc__)
    parser.add_argument("--show", action="store_true", help="write the table of what was recorded")
    if not parser.parse_args().show:
        run()
    if suite() == HERE:  # elsewhere what the table asks of the suite is not installed
        fill(PAGE, {"isolation": shown()})


if __name__ == "__main__":
    main()
