"""Running the shipped suites on a backend in a process of its own, and what each test of them came to.

In pytest, ``-p ml.testing.results --ml-results=FILE`` writes the outcome of every test as one JSON
object at the end, and ``--ml-progress=FILE`` a line for each test when it is done.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest

__all__ = [
    "NO_TESTS",
    "SUITES",
    "Collector",
    "Progress",
    "Result",
    "Run",
    "Selection",
    "installed_suites",
    "load",
    "run_suites",
]

SUITES = ("ml.testing", "kvcache.testing")
NO_TESTS = 5
"""What pytest exits with when nothing was selected."""
_POLL_S = 0.1
_GRACE_S = 5.0

Progress = Callable[[int, int, int], None]
"""Is told how many tests are done, of how many, and how many of these failed."""


class Result(NamedTuple):
    """One test: the module it is written in, its name, operation and dtypes, and how it ended.

    ``outcome`` is "pass", "absent", "n/a" or "FAIL"; ``reason`` says why, where it did not pass.
    """

    area: str
    test: str
    operation: str
    dtypes: str
    outcome: str
    reason: str


class Run(NamedTuple):
    """The results of one backend."""

    name: str
    version: str
    results: tuple[Result, ...]

    @property
    def title(self) -> str:
        return f"{self.name} {self.version}".rstrip()


class Selection(NamedTuple):
    """Which suites run, on what: ``keyword`` is pytest's -k, ``options`` are of ``ml.open_backend``.

    ``isolated``: no pytest.ini, pyproject.toml or conftest.py of the folder takes part, and nothing is
    written there.
    """

    suites: Sequence[str] = SUITES
    keyword: str = ""
    options: Mapping[str, str] = {}
    isolated: bool = False

    def environment(self, scratch: Path) -> dict[str, str] | None:
        """Where hypothesis notes what it found, so that nothing is left in the folder; None: as it is."""
        return {**os.environ, "HYPOTHESIS_STORAGE_DIRECTORY": str(scratch)} if self.isolated else None

    def arguments(self) -> list[str]:
        """As pytest takes them."""
        words = ["--pyargs", *self.suites]
        words += ["-k", self.keyword] if self.keyword else []
        words += [f"--ml-backend-option={key}={value}" for key, value in self.options.items()]
        words += ["-c", os.devnull, "--rootdir", str(Path.cwd()), "--noconftest"] if self.isolated else []
        return words


# In pytest.


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ml", "conformance of ml backends")
    group.addoption(
        "--ml-results", metavar="FILE", help="write the outcome of every test of the suites there"
    )
    group.addoption("--ml-progress", metavar="FILE", help="write a line there for each test that is done")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--ml-results"):
        progress = config.getoption("--ml-progress")
        collector = Collector(
            Path(path), str(config.getoption("--ml-backend")), Path(progress) if progress else None
        )
        config.pluginmanager.register(collector)


class Collector:
    """Notes the outcome of every test, and writes them all at the end. One without an outcome failed."""

    def __init__(self, path: Path, backend: str, progress: Path | None = None) -> None:
        self.path, self.backend, self.progress = path, backend, progress
        self.tests: dict[str, tuple[str, str, str, str]] = {}
        self.outcomes: dict[str, tuple[str, str]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.tests = {item.nodeid: _describe(item) for item in session.items}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.outcomes[report.nodeid] = "FAIL", _failed(report)
        elif report.skipped:
            self.outcomes[report.nodeid] = _skipped(report)
        elif report.when == "call":
            self.outcomes[report.nodeid] = "pass", ""

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if self.progress is not None:
            failed = self.outcomes.get(nodeid, ("FAIL", ""))[0] == "FAIL"
            with self.progress.open("a", encoding="utf-8") as file:
                file.write(f"{len(self.tests)} {int(failed)}\n")

    def pytest_sessionfinish(self) -> None:
        results = [(*test, *self.outcomes.get(nodeid, ("FAIL", ""))) for nodeid, test in self.tests.items()]
        record = {"name": self.backend, "version": _version(self.backend), "results": results}
        self.path.write_text(json.dumps(record, indent=0) + "\n", encoding="utf-8")


def _describe(item: pytest.Item) -> tuple[str, str, str, str]:
    function = getattr(item, "function", None)
    params: Mapping[str, object] = getattr(getattr(item, "callspec", None), "params", {})
    named = params.get("op", params.get("symbol", ""))
    operation = named if isinstance(named, str) else ""
    area = getattr(function, "__module__", "")
    return area, getattr(function, "__name__", item.name), operation, "-".join(_dtypes(params.values()))


def _dtypes(values: Iterable[object]) -> list[str]:
    from ml.dtypes import DType

    found: list[str] = []
    for value in values:
        if isinstance(value, DType):
            found.append(value.name)
        elif isinstance(value, tuple):
            found += _dtypes(value)
    return found


def _failed(report: pytest.TestReport) -> str:
    """The first line of what was raised."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(crash.message if crash is not None else report.longrepr).splitlines()
    return lines[0] if lines else report.when


def _skipped(report: pytest.TestReport) -> tuple[str, str]:
    """A declared absence, or a test that asks nothing of this backend."""
    reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    return ("absent" if reason.startswith("declared absent") else "n/a"), reason


def _version(name: str) -> str:
    from ml.plugins import registry

    spec = registry().specs().get(name)
    return (registry().probe(spec).version or "") if spec is not None else ""


# Around pytest.


def installed_suites() -> list[str]:
    """Those of SUITES whose package is there."""
    return [suite for suite in SUITES if importlib.util.find_spec(suite.partition(".")[0])]


def run_suites(
    name: str,
    path: Path,
    selection: Selection | None = None,
    log: IO[Any] | None = None,
    progress: Progress | None = None,
) -> int:
    """Run the suites on a backend in a process of its own, which writes its results to ``path``.

    What pytest prints goes to ``log`` (None: this process's stderr). Returns pytest's exit code where it
    left results: 0, 1 (tests failed), or NO_TESTS. RuntimeError when pytest itself fails. Whatever is
    raised, the process is over.
    """
    lines = path.with_name(f"{path.name}.progress")
    fixed = f"--ml-backend={name} --ml-results={path} -q --tb=short -p no:cacheprovider -p no:xdist".split()
    fixed += [f"--ml-progress={lines}"] if progress is not None else []
    selection = selection or Selection(installed_suites())
    command = [sys.executable, *_safe_path(), "-m", "pytest", "-p", "ml.testing.results"]
    command += [*selection.arguments(), *fixed]
    process = subprocess.Popen(
        command,
        stdout=sys.stderr if log is None else log,
        stderr=None if log is None else subprocess.STDOUT,
        env=selection.environment(path.parent),
    )
    try:
        if progress is None:
            code = process.wait()
        else:
            code = _followed(process, lines, progress)
    finally:
        _end(process)
        lines.unlink(missing_ok=True)
    if code not in (0, 1, NO_TESTS):
        raise RuntimeError(f"{' '.join(command)} ended with {code}")
    return code


def _safe_path() -> list[str]:
    """-P, unless this process too looks for modules in the folder in which it is."""
    here = Path.cwd()
    return [] if any(Path(entry).absolute() == here for entry in sys.path) else ["-P"]


def _followed(process: subprocess.Popen[Any], lines: Path, progress: Progress) -> int:
    """Tell what the process writes to ``lines`` until it ends; its exit code."""
    done = failed = offset = 0
    total: int | None = None
    while True:
        try:
            code: int | None = process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            code = None
        if lines.exists():
            with lines.open("rb") as file:
                file.seek(offset)
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            offset += len(whole)
            rows = [row.split() for row in whole.decode().splitlines()]
            done, failed = done + len(rows), failed + sum(row[1] == "1" for row in rows)
            total = int(rows[-1][0]) if rows else total
            if rows and total is not None:
                progress(done, total, failed)
        if code is not None:
            return code


def _end(process: subprocess.Popen[Any]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def load(path: Path) -> Run:
    """What a run wrote."""
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return Run(record["name"], record["version"], tuple(Result(*row) for row in record["results"]))
