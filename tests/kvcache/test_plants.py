"""Planted bugs replace something that is there and name a test; planted_bugs.py runs those."""

from __future__ import annotations

import re
from pathlib import Path

import kvcache.testing

from .planting import named
from .plants import BUGS

ROOT = Path(__file__).resolve().parents[2]
SUITES = [Path(path) for path in kvcache.testing.__path__]


def names_of_tests(*paths: Path) -> set[str]:
    files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
    return {
        name for file in files for name in re.findall(r"def test_(\w+)", file.read_text(encoding="utf-8"))
    }


def test_each_planted_bug_replaces_something_and_names_a_test() -> None:
    for place, bugs in BUGS.items():
        file, _, inherited = place.partition("::")
        tests = names_of_tests(ROOT / file, *(SUITES if inherited else ()))
        for target, test, _ in bugs:
            assert named(target) is not None, target
            assert any(name.startswith(test.partition("[")[0]) for name in tests), f"{place}: {test}"
