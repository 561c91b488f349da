"""``kvcache conformance``: the suites' results by area, as a table and as JSON, and what it refuses."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("typer")

from rich.console import Console

from kvcache_engine.command import conformance
from kvcache_engine.command.conformance import Suite, counted, record
from ml.testing import results
from ml.testing.results import Result, Run, Selection, load, run_suites

from . import cli_rig
from .cli_terminal import drawn

FEW = "casts or results_are_exact or slice_is_numpys"


def run(*arguments: object) -> Any:
    return cli_rig.run("conformance", *arguments, env={"PYTEST_ADDOPTS": ""})


def test_it_runs_the_suite_and_counts_by_area(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("--backend", "numpy", "-k", FEW, "--suite", "ml", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert (found["backend"], found["suites"], found["keyword"]) == ("numpy", ["ml.testing"], FEW)
    assert found["version"] == np.__version__
    passed = {row["area"]: row["passed"] for row in found["areas"]}
    assert passed["ml.testing.casts"] == 1
    assert found["passed"] == sum(passed.values())
    assert (found["failed"], found["failures"]) == (0, [])
    assert list(tmp_path.iterdir()) == [], "nothing is left where it was called"
    assert found["not_applicable"] == sum(row["tests"] for row in found["reasons"])


RUN = Run(
    "abacus",
    "1.0",
    (
        Result("ml.testing.sums", "test_sums", ["F32"], "pass", ""),
        Result("ml.testing.sums", "test_sums", ["I8"], "absent", "declared absent: I8"),
        Result("ml.testing.sums", "test_means", [], "n/a", "no means"),
        Result("ml.testing.casts", "test_casts", ["F32-F16"], "FAIL", "AssertionError: assert 1 == 2"),
    ),
    seconds=41.2,
)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command shows RUN in place of running a backend's suites."""
    monkeypatch.setattr(conformance, "_run", lambda *_: RUN)


def test_a_failure_is_named_with_its_reason_and_a_closer_look(ran: None) -> None:
    result = run("--backend", "numpy")
    assert result.exit_code == 1
    suites = "ml.testing kvcache.testing kvcache_engine.testing"
    assert result.stdout.splitlines() == [
        "area               passed   absent      n/a   failed",
        "ml.testing.sums         1        1        1        0",
        "ml.testing.casts        0        0        0        1",
        "abacus 1.0              1        1        1        1",
        "It took 41 s.",
        "FAILED ml.testing.casts: test_casts[F32-F16]: AssertionError: assert 1 == 2",
        f"To run one again: pytest --pyargs {suites} --ml-backend=abacus -k test_casts",
    ]


def test_the_same_as_json(ran: None) -> None:
    result = run("--backend", "numpy", "--json", "--device", "cpu", "--suite", "kvcache")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found == record(RUN, Selection(Suite.KVCACHE.packages, "", {"device": "cpu"}))
    assert (found["options"], found["seconds"]) == ({"device": "cpu"}, 41.2)
    assert found["failures"] == [
        {"area": "ml.testing.casts", "test": "test_casts", "cases": ["F32-F16"],
         "reason": "AssertionError: assert 1 == 2"}
    ]  # fmt: skip
    assert {key: found[key] for key in counted(())} == counted(RUN.results)
    assert [row["reason"] for row in found["reasons"]] == ["declared absent: I8", "no means"]


def test_a_run_in_which_nothing_passed_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    skipped = RUN._replace(results=RUN.results[1:3])
    monkeypatch.setattr(conformance, "_run", lambda *_: skipped)
    result = run("--backend", "numpy")
    assert result.exit_code == 1
    assert result.stderr == "No test passed: all were skipped, so numpy has not been tested.\n"


@pytest.mark.parametrize("width", [24, 60])
def test_the_table_fits_the_terminal(width: int, ran: None, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    monkeypatch.setattr(conformance, "draws", lambda stream: True)
    monkeypatch.setattr(conformance, "Console", lambda **_: console)
    run("--backend", "numpy")
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) > 6
    assert max(map(len, lines)) <= width


@pytest.fixture
def suites_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Installs a suite; the path beside it where its tests may note that they ran."""

    def install(name: str, text: str) -> Path:
        (tmp_path / f"{name}.py").write_text(text)
        return tmp_path / "ran"

    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), before])))
    monkeypatch.chdir(tmp_path)
    return install


SUITE = """
import os
from pathlib import Path

def noted(number):
    with Path(__file__).with_name("ran").open("a") as file:
        file.write(str(number))

def test_1():
    noted(1)

def test_2():
    noted(2)
    assert "MENDED" in os.environ, "it is not mended"

def test_3():
    noted(3)
"""


def test_a_run_stops_at_the_first_failure_and_another_one_keeps_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suites_of: Any
) -> None:
    """Half a line, of a process that was killed, is none."""
    ran, path, seen = suites_of("suite_of_three", SUITE), tmp_path / "results.jsonl", []
    selection = Selection(("suite_of_three",), isolated=True, first=True)
    with (tmp_path / "log").open("w") as log:
        assert run_suites("numpy", path, selection, log, lambda *progress: seen.append(progress)) == 1
    assert (ran.read_text(), load(path).tests, load(path).unfinished) == ("12", 3, 1)
    assert [result.outcome for result in load(path).results] == ["pass", "FAIL"]
    assert load(path).results[1].reason == "AssertionError: it is not mended"
    assert seen[-1] == (2, 3, 1, "suite_of_three")
    with path.open("a") as file:
        file.write('["half')
    assert len(load(path).results) == 2
    monkeypatch.setenv("MENDED", "1")
    assert run_suites("numpy", path, Selection(("suite_of_three",), isolated=True)) == 0
    assert (ran.read_text(), load(path).tests, load(path).unfinished) == ("12123", 3, 0)
    assert [result.outcome for result in load(path).results] == ["pass"] * 3


TABLE = """
import numpy as np
from ml.testing.harness import BackendCase, each

class TestTable(BackendCase):
    @each(number={"one": 1, "two": 2, "four": 4})
    def test_odd(self, number):
        assert number % 2 == 1, f"{number} is even"

    @each(number={"two": 2, "four": 4})
    def test_nothing_is_one(self, number):
        raise ValueError("it is\\nbroken")

    @each(number={"one": [1], "two": [2], "four": [4]})
    def test_arrays(self, number):
        np.testing.assert_array_equal(number, [1])
"""


def test_of_a_table_the_cases_that_failed_are_named_and_the_reason_of_the_first(
    tmp_path: Path, suites_of: Any
) -> None:
    suites_of("suite_of_a_table", TABLE)
    with (tmp_path / "log").open("w") as log:
        run_suites("numpy", tmp_path / "kept", Selection(("suite_of_a_table",), isolated=True), log)
    odd, nothing, arrays = load(tmp_path / "kept").results
    assert odd.cases == ["two", "four"]
    assert odd.reason == "2 of 3 cases failed: two; four (two: AssertionError: 2 is even)"
    assert nothing.cases == ["two", "four"]
    assert nothing.reason == "all 2 cases failed: ValueError: it is broken"
    assert arrays.reason.startswith(
        "2 of 3 cases failed: two; four (two: AssertionError: Arrays are not equal Mismatched elements: 1"
    )
    assert "four: " not in arrays.reason


def test_the_command_says_what_was_not_run(ran: None) -> None:
    unfinished = RUN._replace(tests=9, unfinished=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conformance, "_run", lambda *_: unfinished)
        shown = run("--backend", "numpy", "-x").stdout
        assert "Stopped at the first failure: 5 of 9 tests were not run." in shown.splitlines()
        assert json.loads(run("--backend", "numpy", "-x", "--json").stdout)["not_run"] == 5


def test_where_no_bar_can_be_drawn_lines_say_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def looked_at_before_the_first_test(*arguments: Any) -> int:
        arguments[-1](0, 3, 0, "")
        return run_suites(*arguments)

    monkeypatch.setattr(results, "run_suites", looked_at_before_the_first_test)
    monkeypatch.setattr(conformance, "EVERY_S", 0.0)
    result = run("--backend", "numpy", "-k", "casts or slice_is_numpys or any_walk", "--suite", "ml")
    passed, *others = result.stdout.splitlines()[-2].split()[2:]
    assert others == ["0", "0", "0"]
    lines = [*dict.fromkeys(result.stderr.splitlines())]
    assert (passed, lines[:2]) == ("3", ["0/3 tests", "collecting the tests"])
    told = re.compile(r"\d/3 tests(, at ml\.testing\.\w+(: test_\w+(\[.*\])?)?( for \d+ s)?)?")
    assert [line for line in lines[2:] if not told.fullmatch(line)] == []
    assert ", at " in lines[-1]


HANGING = """
import os
import signal
import time

import pytest

def test_before():
    pass

@pytest.mark.parametrize("dtype", ["F32"])
def test_hanging(dtype):
    if "BLOCKED" in os.environ:  # as in a framework's own code
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    try:
        time.sleep(600)
    except Exception:
        pytest.fail("what is under test would have gone on")

def test_after():
    pass
"""


def test_a_test_that_hangs_is_named_while_it_hangs_and_fails_when_its_time_is_over(
    tmp_path: Path, suites_of: Any
) -> None:
    suites_of("suite_that_hangs", HANGING)
    selection, seen = Selection(("suite_that_hangs",), isolated=True, time_limit=0.5), []
    with (tmp_path / "log").open("w") as log:
        assert run_suites("numpy", tmp_path / "kept", selection, log, lambda *at: seen.append(at)) == 1
    assert (1, 3, 0, "suite_that_hangs: test_hanging[F32]") in seen
    assert [result.outcome for result in load(tmp_path / "kept").results] == ["pass", "FAIL", "pass"]
    reason = load(tmp_path / "kept").results[1].reason
    assert reason.endswith("test_hanging[F32] did not end within 0.5 s (--ml-time-limit)")


def test_a_test_that_no_signal_interrupts_ends_the_run_by_name(
    tmp_path: Path, suites_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    suites_of("suite_that_hangs", HANGING)
    monkeypatch.setenv("BLOCKED", "1")
    selection = Selection(("suite_that_hangs",), isolated=True, time_limit=0.5)
    with (
        (tmp_path / "log").open("w") as log,
        pytest.raises(RuntimeError, match=r"^suite_that_hangs: test_hanging\[F32\] hung for more than 0.5 s"),
    ):
        run_suites("numpy", tmp_path / "kept", selection, log)
    assert "in test_hanging" in (tmp_path / "log").read_text(), "all threads are printed"


def test_a_crash_before_the_first_test_names_the_signal(
    suites_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    suites_of("suite_that_cannot_be_imported", "import os\nos.abort()\n")
    monkeypatch.setattr(Suite, "packages", ("suite_that_cannot_be_imported",))
    result = run("--backend", "numpy")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == (
        "kvcache: conformance: before the first test, the process was killed by SIGABRT; "
        "--debug shows the output"
    )


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV in"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL (as when memory runs out) in"),
        ("os._exit(0)", "ended with exit code 0 in"),
    ],
)
def test_a_crash_names_signal_and_test(
    suites_of: Any, monkeypatch: pytest.MonkeyPatch, end: str, said: str
) -> None:
    text = f"import os, signal\ndef test_1():\n    pass\ndef test_2():\n    {end}\ndef test_3():\n    pass\n"
    suites_of("suite_that_crashes", text)
    monkeypatch.setattr(Suite, "packages", ("suite_that_crashes",))
    result = run("--backend", "numpy")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == (
        f"kvcache: conformance: after 1 of 3 tests, the process {said} suite_that_crashes: test_2; "
        "-k 'not TEST' leaves a test out; --debug shows the output"
    )
    if "SIGSEGV" in said:
        assert run("--backend", "numpy", "-k", "not test_2").exit_code == 0


def test_without_the_extra_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("pytest", "hypothesis") else find(name)
    )
    result = run("--backend", "numpy")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "pytest and hypothesis not installed" in result.stderr
    assert "pip install 'ml-kvcache[testing]'" in result.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals on Windows")
def test_a_bar_counts_the_tests_on_a_terminal(tmp_path: Path) -> None:
    line = ["conformance", "--backend", "numpy", "-k", "casts", "--suite", "ml"]
    code, shown = drawn(line, tmp_path / "out", PYTEST_ADDOPTS="")
    assert code == 0
    assert "collecting" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h")
    assert "ml.testing.casts" in (tmp_path / "out").read_text()
