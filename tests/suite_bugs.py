"""Bugs for the cache suite to notice: how they are listed by area, and an inner run of one area."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

__all__ = ["SLIPS", "Bugs", "Patch", "check_noticed"]

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]

_MODULES = {
    "Batch": "batches", "Fault": "faults", "Mask": "masks", "Window": "windows",
    "LazySnapshot": "lazy", "ScheduledSnapshot": "scheduled", "ScheduledState": "scheduled",
    "EncoderSnapshot": "composed", "WrapperSnapshot": "composed",
}  # fmt: skip
SLIPS = ("AttributeError", "TypeError", "NameError")
"""What a planted bug raises that names or calls something that is no longer so."""


@dataclass
class Bugs:
    """What is wrong -> (module of the area that has to notice, its class, how to plant it)."""

    found: dict[str, tuple[str, str, Plant]] = field(default_factory=dict)

    def bug(self, area: str) -> Callable[[Plant], Plant]:
        def plant(function: Plant) -> Plant:
            self.found[function.__name__] = (_MODULES.get(area, area.lower()), f"{area}Tests", function)
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


def _run_area(folder: Path, module: str, name: str) -> _Recorder:
    file = folder / f"test_area_{name.lower()}.py"
    file.write_text(
        f"from kvcache.testing.{module} import {name}\n\n\n"
        f'class TestArea({name}):\n    backend_name = "numpy"\n    long_run = 2000\n'
    )
    recorder = _Recorder()
    options = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-c", str(folder / "none.ini")]
    (folder / "none.ini").write_text("[pytest]\n")
    pytest.main([str(file), f"--rootdir={folder}", "--import-mode=importlib", *options], plugins=[recorder])
    return recorder


def check_noticed(bugs: Bugs, name: str, folder: Path, patch: Patch) -> None:
    """Plant the bug, run its area, and fail unless a test of it did, for what is wrong with the cache."""
    module, area, plant = bugs.found[name]
    plant(patch)
    found = _run_area(folder, module, area)
    patch.undo()
    print(name, "->", *found.failed)
    assert found.failed, f"{name}: {found.passed} tests of {area} passed, and none failed"
    reasons = [line for text in found.failed.values() for line in text.splitlines() if line.startswith("E ")]
    slips = [line for line in reasons if any(slip in line for slip in SLIPS)]
    assert not slips, f"{name} does not fit the code that it is to break: {slips}"
