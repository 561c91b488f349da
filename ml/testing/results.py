"""Run the shipped suites on a backend in a separate process, and collect the result of each test.

In pytest, ``-p ml.testing.results --ml-results=FILE`` writes a record in lines of JSON: one for the backend,
one for the number of tests, and two for each test, when it begins and when it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest

from ml.testing.time_limit import SECONDS

SUITES = ("ml.testing", "kvcache.testing")
LONGEST = 300
"""The largest length of a reason, in characters."""
NO_TESTS = 5
"""pytest's exit code if no test was selected."""
_INTERRUPTED = 2
_POLL_S = 0.1
_GRACE_S = 5.0

Progress = Callable[[int, int, int, str], None]
"""Called ten times a second with the number of finished tests, of all tests (0 during collection) and of
failed tests, and the area and name of the running test.
"""


class CrashedError(RuntimeError):
    """The process was killed or ended during a test; the message says how, and during which test. ``test`` is
    the test's area and name; empty before the first test and after the last.
    """

    def __init__(self, how: str, test: str) -> None:
        super().__init__(how)
        self.test = test


class Result(NamedTuple):
    """The result of one test: its module, its name, and its outcome.

    ``outcome`` is "pass", "absent", "n/a" or "FAIL"; ``reason`` says why it did not pass. ``cases`` are the
    failed cases of a table, or the parameters of a parametrized test.
    """

    area: str
    test: str
    cases: Sequence[str]
    outcome: str
    reason: str


class Run(NamedTuple):
    """The results of one backend, without the ``unfinished`` of its ``tests``, and how long they took."""

    name: str
    version: str
    results: tuple[Result, ...]
    tests: int = 0
    unfinished: int = 0
    seconds: float = 0.0

    @property
    def title(self) -> str:
        return f"{self.name} {self.version}".rstrip()


class Selection(NamedTuple):
    """Which tests run, and how: ``keyword`` is pytest's -k, ``options`` go to ``ml.open_backend``.

    ``isolated``: ignore the folder's pytest.ini, pyproject.toml and conftest.py, and write nothing there.
    ``quick``: run the tests of ``--ml-quick``. ``first``: stop at the first failure. ``time_limit``: seconds
    per test; 0 means no limit, None the default of the option.
    """

    suites: Sequence[str] = SUITES
    keyword: str = ""
    options: Mapping[str, str] = {}
    isolated: bool = False
    quick: bool = False
    first: bool = False
    time_limit: float | None = None

    def environment(self, scratch: Path) -> dict[str, str] | None:
        """The environment of the process; hypothesis writes its database to ``scratch`` if isolated. None:
        inherited.
        """
        return {**os.environ, "HYPOTHESIS_STORAGE_DIRECTORY": str(scratch)} if self.isolated else None

    def arguments(self) -> list[str]:
        """The selection as arguments of pytest."""
        words = ["--pyargs", *self.suites]
        words += ["-k", self.keyword] if self.keyword else []
        words += [f"--ml-backend-option={key}={value}" for key, value in self.options.items()]
        words += ["--ml-quick"] if self.quick else []
        words += ["--exitfirst"] if self.first else []
        words += [] if self.time_limit is None else [f"--ml-time-limit={self.time_limit}"]
        words += ["-c", os.devnull, "--rootdir", str(Path.cwd()), "--noconftest"] if self.isolated else []
        return words


# In pytest.


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ml", "conformance of ml backends")
    group.addoption("--ml-results", metavar="FILE", help="write the result of every test to this file")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--ml-results"):
        options = config.getoption("--ml-backend-option")
        pairs = dict(option.split("=", 1) for option in options if "=" in option)
        config.pluginmanager.register(_Collector(Path(path), str(config.getoption("--ml-backend")), pairs))


class _Collector:
    """Writes the record of a run to ``path``."""

    def __init__(self, path: Path, backend: str, options: Mapping[str, str]) -> None:
        self.path = path
        self.tests: dict[str, tuple[str, str, list[str]]] = {}
        self.outcomes: dict[str, tuple[list[str], str, str]] = {}
        path.write_bytes(b"")
        self._add(_head(backend, options))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self._add({"tests": len(items)})
        for item in items:
            function, callspec = getattr(item, "function", None), getattr(item, "callspec", None)
            name = getattr(function, "__name__", item.name)
            area = getattr(function, "__module__", "")
            self.tests[item.nodeid] = area, name, [] if callspec is None else [callspec.id]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        area, test, parameters = self.tests[nodeid]
        name = f"{area}: {test}{''.join(f'[{one}]' for one in parameters)}"
        self._add({"running": name, "began": time.time()})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            cases = [str(value) for name, value in report.user_properties if name == "ml_case"]
            self.outcomes[report.nodeid] = cases, "FAIL", _failed(report, cases)
        elif report.skipped:
            self.outcomes[report.nodeid] = [], *_skipped(report)
        elif report.when == "call":
            self.outcomes[report.nodeid] = [], "pass", ""

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """A test without an outcome failed."""
        area, test, parameters = self.tests[nodeid]
        cases, outcome, reason = self.outcomes.pop(nodeid, ([], "FAIL", ""))
        self._add([nodeid, area, test, cases or parameters, outcome, reason])

    def _add(self, line: object) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _failed(report: pytest.TestReport, cases: Sequence[str]) -> str:
    """The error in one line; for a table, the failed cases and the error of the first."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash is not None else report.longrepr)
    counts, _, said = text.removeprefix("ml.testing.harness.CasesFailedError: ").partition("\n")
    if not cases or not said.startswith(f"    {cases[0]}: "):
        return _line(f"{counts} {said}") or str(report.when)
    first = said.partition(f"\n    {cases[1]}: ")[0] if len(cases) > 1 else said
    return f"{counts} ({_line(first)})"


def _line(text: str) -> str:
    """The first lines of a message: NumPy's begin with an empty line and show arrays."""
    return " ".join(text.split())[:LONGEST]


def _skipped(report: pytest.TestReport) -> tuple[str, str]:
    """ "absent" for a declared absence, "n/a" for a test that does not apply to this backend."""
    reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    return ("absent" if reason.startswith("declared absent") else "n/a"), reason


# Around pytest.


def run_suites(
    name: str,
    path: Path,
    selection: Selection | None = None,
    log: IO[Any] | None = None,
    progress: Progress | None = None,
) -> int:
    """Run the suites on a backend in a separate process, which writes its results to ``path``. pytest's
    output goes to ``log`` (None: this process's stderr). Returns pytest's exit code: 0, 1 (tests failed), or
    NO_TESTS. Raises CrashedError if the process is killed or ends during a test, and RuntimeError if pytest
    itself fails. The process has ended in any case.
    """
    fixed = f"--ml-backend={name} --ml-results={path} -q --tb=short -p no:cacheprovider -p no:xdist".split()
    selection = selection or Selection()
    # -P, unless this process also imports modules from the current folder.
    safe = [] if any(Path(entry).absolute() == Path.cwd() for entry in sys.path) else ["-P"]
    command = [sys.executable, *safe, "-m", "pytest", "-p", "ml.testing.results"]
    command += [*selection.arguments(), *fixed]
    process = subprocess.Popen(
        command,
        stdout=sys.stderr if log is None else log,
        stderr=None if log is None else subprocess.STDOUT,
        env=selection.environment(path.parent),
    )
    try:
        code = process.wait() if progress is None else _followed(process, path, progress)
    finally:
        _end(process)
    record = _Record(path)
    record.read()
    if code < 0 or (record.running and code != _INTERRUPTED):
        how = f"{_ended(code)} in {record.running}" if record.running else _ended(code)
        limit = SECONDS if selection.time_limit is None else selection.time_limit
        if record.running and code == 1 and limit and time.time() - record.began > limit:
            how = f"{record.running} hung for more than {limit:g} s and could not be interrupted"
        raise CrashedError(how, record.running)
    if code not in (0, 1, NO_TESTS):
        raise RuntimeError(f"{' '.join(command)}: {_ended(code)}")
    return code


def _ended(code: int) -> str:
    """How a process ended, by its exit code."""
    if code >= 0:
        return f"the process ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    memory = " (as when memory runs out)" if name == "SIGKILL" else ""
    return f"the process was killed by {name}{memory}"


def _followed(process: subprocess.Popen[Any], path: Path, progress: Progress) -> int:
    """Report the progress of the process until it ends; returns its exit code."""
    record = _Record(path)
    while True:
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(_POLL_S)
        record.read()
        failed = sum(result.outcome == "FAIL" for result in record.results.values())
        progress(len(record.results), record.tests, failed, record.running or record.last)
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


class _Record:
    """The record of a run in progress. An incomplete last line is read later."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset = path, 0
        self.head: dict[str, Any] = {}
        self.results: dict[str, Result] = {}
        self.tests = 0
        self.running, self.began = "", 0.0
        """The running test, and when it began, in seconds since the epoch."""
        self.last = ""
        """The area of the last finished test."""

    def read(self) -> None:
        """Read the lines added since the last call. Raises ValueError if the file is not such a record."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self.offset += len(whole)
        try:
            for line in whole.decode().splitlines():
                self._take(json.loads(line))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.path} contains no results of the suites: {error}") from None

    def _take(self, line: Any) -> None:
        if isinstance(line, list) and self.head:
            self.results[line[0]] = result = Result(*line[1:])
            self.running, self.last = "", result.area
        elif isinstance(line, dict) and "running" in line and self.head:
            self.running, self.began = line["running"], line["began"]
        elif isinstance(line, dict) and "tests" in line and self.head:
            self.tests = line["tests"]
        elif isinstance(line, dict) and line.keys() == {"backend", "version", "options"}:
            self.head = line
        else:
            raise ValueError(f"line {line!r:.60}")


def _head(backend: str, options: Mapping[str, str]) -> dict[str, Any]:
    """The first line of a record."""
    from ml.plugins import registry

    spec = registry().specs().get(backend)
    version = (registry().probe(spec).version or "") if spec is not None else ""
    return {"backend": backend, "version": version, "options": dict(sorted(options.items()))}


def load(path: Path) -> Run:
    """The results of the run recorded in ``path``."""
    record = _Record(path)
    record.read()
    if not record.head:
        raise ValueError(f"{path} contains no results of the suites: it is empty")
    name, version = record.head["backend"], record.head["version"]
    results = tuple(record.results.values())
    return Run(name, version, results, record.tests, record.tests - len(results))
