"""The table of what passes where: made from results, and from a run of the suite."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ml.testing.results import Result, Run, run_suites
from ml.testing.table import render

DTYPES = ("F32", "F16", "I8")
DOCS = Path(__file__).resolve().parents[1] / "docs"


def results(**outcomes: str) -> tuple[Result, ...]:
    """Two tests; ``outcomes`` says what did not pass, by dtype or operation."""
    rows = [("test_sums_add_up", "sum", dtype) for dtype in DTYPES]
    rows += [("test_it_is_refused", operation, "") for operation in ("sum", "view")]
    return tuple(
        Result("ml.testing.sums", test, operation, dtypes, end := outcomes.get(dtypes or operation, "pass"),
               "declared absent: I8" if end == "absent" else "")
        for test, operation, dtypes in rows
    )  # fmt: skip


def test_what_is_alike_shares_a_row_and_what_differs_has_its_own() -> None:
    runs = [Run("one", "1.0", results()), Run("two", "2.0", results(I8="absent", F16="FAIL", view="FAIL"))]
    page = render(runs, "the command").splitlines()
    for line in (
        "$ the command",
        "one 1.0, two 2.0.",
        "| ml.testing.sums | 5 pass | 2 pass, 1 absent, **2 FAIL** |",
        "| F16 | 1 pass | **1 FAIL** |",
        "| declared absent: I8 |  | 1 |",
        "| sums add up | `sum` | F32 | 1 pass | 1 pass |",
        "| sums add up | `sum` | F16 | 1 pass | **1 FAIL** |",
        "| sums add up | `sum` | I8 | 1 pass | 1 absent |",
        "| it is refused | `view` |  | 1 pass | **1 FAIL** |",
    ):
        assert line in page
    page = render(runs[:1], "the command").splitlines()
    assert "| sums add up | `sum` | F32 F16 I8 | 3 pass |" in page
    assert "| it is refused | `sum` `view` |  | 2 pass |" in page


def test_it_counts_what_the_suite_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k 'rms_norm or rope_is_the_generic_rope'")
    command = [sys.executable, "-m", "ml.testing.table", "--ml-backends", "numpy", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "$ python -m ml.testing.table --ml-backends numpy\n" in done.stdout
    norms = next(line for line in done.stdout.splitlines() if line.startswith("| rms norm "))
    assert norms == "| rms norm squares in f32 or better |  | F16 BF16 | 2 pass |"
    assert "FAIL" not in done.stdout.split("## By area")[1]
    assert "no SupportsRope" in done.stdout
    assert (tmp_path / "numpy.jsonl").exists()
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert again.stdout == done.stdout
    assert again.stderr == "", "a report that is there is not made again"


def test_a_run_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with 4"):
        run_suites("nonesuch", tmp_path / "nonesuch.jsonl")


def test_the_page_in_the_docs_says_that_all_pass() -> None:
    page = (DOCS / "conformance.md").read_text(encoding="utf-8")
    for name in ("numpy", "torch", "mlx"):
        assert f"{name} " in page.split("## By area")[0]
    assert "FAIL" not in page.split("## By area")[1]
