"""Bugs for the cache suite to notice: how they are listed by area, and an inner run of one area."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

__all__ = ["SLIPS", "Bugs", "Patch", "check_noticed"]

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]

_CLASSES = {
    "Storing": "storing", "Fault": "faults", "Mask": "suites.masks", "Attending": "suites.attending",
    "Reading": "suites.reading", "Property": "suites.properties",
}  # fmt: skip
"""Areas that ship as a class, and their modules; of all others the random traces notice it ..."""
_FILES = {
    "LazySnapshot": "test_snapshots", "ScheduledSnapshot": "test_snapshots", "ScheduledState": "test_states",
    "EncoderSnapshot": "test_encoder", "WrapperSnapshot": "test_wrapper_snapshots",
}  # fmt: skip
"""... or a file of tests/caches."""
_RENAMED = {"Reserving": "Reading"}
SLIPS = ("AttributeError", "TypeError", "NameError")
"""What a planted bug raises that names or calls something that is no longer so."""


@dataclass
class Bugs:
    """What is wrong -> (area that has to notice, how to plant it)."""

    found: dict[str, tuple[str, Plant]] = field(default_factory=dict)

    def bug(self, area: str) -> Callable[[Plant], Plant]:
        def plant(function: Plant) -> Plant:
            self.found[function.__name__] = _RENAMED.get(area, area), function
            return function

        return plant


class _Recorder:
    """Which tests failed in an inner run, and why."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.passed and report.when == "call"
        if report.failed:
            self.failed[report.nodeid] = str(report.longrepr)


def _run_area(folder: Path, area: str) -> _Recorder:
    root, options = Path(__file__).parents[1], ["-k", "numpy", "-x", "-q", "--tb=short"]
    if area in _FILES:
        file = root / "tests" / "caches" / f"{_FILES[area]}.py"
    else:
        area = area if area in _CLASSES else "Property"
        root, file = folder, folder / f"test_numpy_{area.lower()}.py"
        file.write_text(
            f"from kvcache.testing.{_CLASSES[area]} import {area}Tests\n\n\n"
            f'class TestArea({area}Tests):\n    backend_name = "numpy"\n    traces = 400\n'
        )
    recorder = _Recorder()
    options += ["-p", "no:cacheprovider", f"--rootdir={root}", "-c", str(folder / "none.ini")]
    (folder / "none.ini").write_text("[pytest]\n")
    pytest.main([str(file), "--import-mode=importlib", *options], plugins=[recorder])
    return recorder


def check_noticed(bugs: Bugs, name: str, folder: Path, patch: Patch) -> None:
    """Plant the bug, run its area, and fail unless a test of it did, for what is wrong with the cache."""
    area, plant = bugs.found[name]
    plant(patch)
    found = _run_area(folder, area)
    patch.undo()
    print(name, "->", *found.failed)
    assert found.failed, f"{name}: {found.passed} tests of {area} passed, and none failed"
    reasons = [line for text in found.failed.values() for line in text.splitlines() if line.startswith("E ")]
    slips = [line for line in reasons if any(slip in line for slip in SLIPS)]
    assert not slips, f"{name} does not fit the code that it is to break: {slips}"
