"""FileStore under kill -9, shared by processes, on a full device and in a folder that may only be read."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="FileStore needs a POSIX system")
PROGRAM = Path(__file__).with_name("stores_crash.py")


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that another user may enter, which pytest's own may not be."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path / "store"
    shutil.rmtree(path)


def run(scenario: str, folder: Path, *numbers: object, bug: str = "none") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), scenario, str(folder), bug, *map(str, numbers)]
    environment = {**os.environ, "PYTHONPATH": str(PROGRAM.parents[1])}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)


def passes(scenario: str, folder: Path, *numbers: object) -> str:
    done = run(scenario, folder, *numbers)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_killed_before_and_after_every_call_to_the_system_only_whole_entries_remain(folder: Path) -> None:
    places = int(passes("killed_at_each_call", folder).split()[0])
    assert places > 60


def test_killed_at_any_moment_what_was_acknowledged_is_there(folder: Path) -> None:
    acknowledged = int(passes("killed_at_random", folder, 60, "none").split()[2])
    assert acknowledged > 60


def test_killed_at_any_moment_only_the_oldest_have_made_room(folder: Path) -> None:
    passes("killed_at_random", folder, 30, 40_000)


@pytest.mark.parametrize("budget", ["none", 40_000])
def test_killed_beside_another_process_whatever_becomes_of_the_index(folder: Path, budget: object) -> None:
    assert int(passes("killed_beside_another", folder, 12, budget).split()[0]) == 24


def test_two_writers_and_two_readers_share_a_folder_with_eviction(folder: Path) -> None:
    assert "opened" in passes("sharing", folder)


def test_a_forked_child_goes_on_with_its_parents_store(folder: Path) -> None:
    passes("forked", folder)


def test_a_full_device_leaves_no_debris(folder: Path) -> None:
    passes("no_room", folder)


def test_a_folder_that_may_only_be_read_is_served_and_not_touched(folder: Path) -> None:
    passes("reading_only", folder)


@pytest.mark.parametrize(
    ("bug", "scenario"),
    [
        ("sweep nothing", "killed_at_each_call"),
        ("say nothing of changes", "killed_at_each_call"),
        ("say not what changes", "killed_at_each_call"),
        ("forget the halves", "killed_at_each_call"),
        ("sweep the living", "sharing"),
        ("keep what failed", "no_room"),
        ("lock nothing", "sharing"),
    ],
)
def test_the_scenarios_notice_what_they_are_for(folder: Path, bug: str, scenario: str) -> None:
    done = run(scenario, folder, bug=bug)
    assert done.returncode == 1, done.stdout
    assert "Traceback" in done.stderr


def test_every_bug_of_the_program_is_tried() -> None:
    spec = importlib.util.spec_from_file_location("stores_crash", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    (mark,) = test_the_scenarios_notice_what_they_are_for.pytestmark  # type: ignore[attr-defined]
    assert {bug for bug, _ in mark.args[1]} == set(program.BUGS)
