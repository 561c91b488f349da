"""A machine that lacks something: tests are skipped and the run says so, and ``make`` says what it lacks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .kvcache.planting import NOTHING, UNUSED, Planter
from .needs import PACKAGES, need_program, not_run, wanting

ROOT = Path(__file__).resolve().parents[1]


def test_one_line_says_what_did_not_run_for_want_of_what_and_how_to_have_it() -> None:
    reasons = [
        *[f"Skipped: {wanting('redis-server')}"] * 3,
        wanting("iproute2"),
        f"2 of 5 bugs are left out: {wanting('redis-server')}",
        wanting("a model", "put it into ../models"),
        "cupy cannot run here: no CUDA driver",
    ]
    assert not_run(reasons) == (
        "Tests that did not run for want of something: redis-server (4), iproute2 (1), a model (1). "
        "To run them: apt-get install redis-server iproute2; put it into ../models"
    )
    assert not_run(["cupy cannot run here: no CUDA driver"]) == ""


def test_a_run_ends_with_that_line(tmp_path: Path) -> None:
    (tmp_path / "test_wanting.py").write_text(
        """if True:
        from tests.needs import need_program

        def test_of_a_program(monkeypatch):
            monkeypatch.setenv("PATH", "")
            need_program("zsh")

        def test_of_nothing():
            pass
        """
    )
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_sessionfinish\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n1", "-p", "no:cacheprovider", "-c", os.devnull, tmp_path],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == (
        "Tests that did not run for want of something: zsh (1). To run them: apt-get install zsh"
    )


def test_a_planted_bug_whose_test_is_skipped_here_is_left_out_with_the_reason(tmp_path: Path) -> None:
    """One whose test runs and does not fail is not."""
    file = tmp_path / "test_these.py"
    file.write_text(
        f"""if True:
        import pytest
        from kvcache.stores import MemoryStore

        def test_skipped():
            pytest.skip("{wanting("redis-server")}")

        def test_blind():
            pass

        def test_noticing():
            assert MemoryStore().put("a", [b"x"])
        """
    )
    put = "stores.memory:MemoryStore.put"
    planter = Planter([(put, "skipped", NOTHING), (put, "blind", NOTHING), (put, "noticing", NOTHING)])
    pytest.main([str(file), "-q", "--tb=no", "-c", os.devnull, *UNUSED], plugins=[planter])
    assert planter.unnoticed == [f"{put}: blind"]
    assert planter.skipped == {f"{put}: skipped": wanting("redis-server")}


def test_the_packages_that_tests_are_skipped_for_are_those_that_make_installs() -> None:
    """Debian always has make, which runs this, and bash."""
    text = (ROOT / ".ci" / "packages").read_text(encoding="utf-8")
    brought = {*re.findall(r"^    \[(\S+)\]=", text, re.MULTILINE)}
    asked = {*PACKAGES.values(), "redis-server", "libibverbs1", "libnuma1", "libcurl4"}
    assert asked - {"make", "bash"} == brought


@pytest.mark.parametrize(
    ("python", "told"),
    [
        ("exit 1", r"Python 3\.11 or newer is needed, and '.*python' is not one: make PYTHON="),
        ('[ "$1" = -c ] && exit 0; mkdir -p "$3/bin"; touch "$3/bin/python"; exit 1',
         r"'.*python' makes no virtual environments; on Debian: apt-get install python3-venv"),
    ],
)  # fmt: skip
def test_without_a_python_that_will_do_make_says_so_each_time(tmp_path: Path, python: str, told: str) -> None:
    """Debian's python3 without python3-venv leaves half an environment behind."""
    (tmp_path / "python").write_text(f"#!/bin/sh\n{python}\n")
    (tmp_path / "python").chmod(0o755)
    venv = tmp_path / "venv"
    line = [need_program("make"), f"PYTHON={tmp_path / 'python'}", f"VENV={venv}", "run"]
    for _ in range(2):
        done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=ROOT)
        assert done.returncode == 2
        assert re.search(told, done.stdout), done.stdout
        assert not venv.exists()
