"""Ranks that report to whoever started them: who is told to be the cause, and that all end in time."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ml
from kvcache_engine.errors import RunnerError
from kvcache_engine.rank import LATE, LOST, Limits, RanksError, exit_code
from kvcache_engine.ranks import run_ranks

from . import local_launcher

pytestmark = pytest.mark.skipif(not hasattr(os, "WUNTRACED"), reason="starts ranks, which needs POSIX")

TIMEOUTS = st.floats(0.1, 3600.0)
RANK = """
import os, pathlib, signal, sys, time
from kvcache_engine.rank import LATE, LOST, job_of_rank, leave
job, rank = job_of_rank().decode(), int(os.environ["RANK"])
there = pathlib.Path(job.split()[0])
(there / str(rank)).write_text(f"{os.getpid()} {os.environ['WORLD_SIZE']}")
def say(text, code):
    print("kvcache: " + text, file=sys.stderr)
    leave(code)
def wait(name):
    while not (there / name).exists(): time.sleep(0.01)
"""


def launcher(size: int) -> list[str]:
    return local_launcher.launcher(size, "kvcache_engine.rank")


def run(program: str, folder: Path, size: int = 2, timeout: float = 5.0, job: str = "") -> None:
    command = [sys.executable, "-P", "-c", RANK + program]
    run_ranks(launcher(size), command, size, f"{folder} {job}".encode(), timeout)


def left(folder: Path) -> list[int]:
    """The ranks that are still there; one that was killed has a moment to go on a busy machine."""
    ends = time.monotonic() + 5
    while (found := there(folder)) and time.monotonic() < ends:
        time.sleep(0.02)
    return found


def there(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.glob("[0-9]") if _runs(path))


def _runs(path: Path) -> bool:
    words = path.read_text().split()
    if not words:  # it was ended before it had written
        return False
    process = words[0]
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        os.kill(int(process), 0)
        return Path(f"/proc/{process}/stat").read_text().split(")")[1].split()[0] != "Z"
    return False


@given(TIMEOUTS)
def test_whatever_ends_a_rank_there_is_time_left_to_end_all(timeout: float) -> None:
    limits = Limits(timeout)
    assert limits.waiting + limits.settling + limits.ending <= timeout - limits.reserve / 4
    assert limits.waiting >= max(timeout - 2, timeout * 0.66)


@pytest.mark.parametrize("timeout", [0.0, -1.0, math.inf, math.nan, 1e10, 10**400, "5", None])
def test_a_timeout_that_is_no_number_of_seconds_is_refused_before_anything_starts(
    timeout: Any, tmp_path: Path
) -> None:
    with pytest.raises(ml.ShapeError, match="a number of seconds above 0, at most 604800"):
        run("leave(0)", tmp_path, timeout=timeout)
    assert not list(tmp_path.iterdir())


def test_a_wait_that_was_too_long_and_a_lost_rank_have_exit_codes_of_their_own() -> None:
    lost, late = ml.GroupError("lost"), ml.GroupError("late")
    late.late = True
    assert (exit_code(lost), exit_code(late)) == (LOST, LATE)


@pytest.mark.parametrize(
    ("program", "cause"),
    [
        ("say('lost another', LOST) if rank == 0 else (time.sleep(0.2), say('no room', 1))",
         "rank 1 of 2: no room"),
        ("say('no room', 1)", "(rank 1 of 2: )?no room$"),
        ("say('it was late', LATE) if rank == 1 else time.sleep(60)", "rank 1 of 2: it was late"),
        ("say('it was late', LATE) if rank == 0 else os.kill(os.getpid(), signal.SIGSTOP)",
         "it was late$"),
        ("os.kill(os.getpid(), 9) if rank == 1 else (wait('1'), time.sleep(0.3), say('lost', LOST))",
         "rank 1 of 2 was killed, and all others with it; .* out of memory"),
        ("sum(1) if rank == 1 else time.sleep(60)",
         r"rank 1 of 2 was killed, .* \(TypeError: 'int' object .*\)"),
        ("leave(0) if rank == 0 else time.sleep(60)",
         "rank 1 of 2 did not end within the timeout"),
    ],
    ids=["another's consequence", "all say the same", "a wait", "stopped", "killed", "ended unasked",
         "left behind"],
)  # fmt: skip
def test_the_cause_is_told_in_one_line_and_no_rank_is_left(program: str, cause: str, tmp_path: Path) -> None:
    with pytest.raises(RanksError, match=f"^{cause}") as caught:
        run(program, tmp_path)
    assert len(caught.value.told) == 2
    assert left(tmp_path) == []


def test_the_job_and_standard_output_of_rank_0_reach_where_they_should(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = "print('shown' if rank == 0 else 'hidden'); (there / 'job').write_text(job[-9:]); leave(0)"
    run(program, tmp_path, 3, job="x" * (1 << 20) + "the end!!")
    assert capfd.readouterr() == ("shown\n", "")
    assert [(tmp_path / str(rank)).read_text().split()[1] for rank in range(3)] == ["3"] * 3
    assert (tmp_path / "job").read_text() == "the end!!"


def test_ranks_end_when_their_starter_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "start.py"
    command = [sys.executable, "-P", "-c", RANK + "time.sleep(60)"]
    script.write_text(
        "from kvcache_engine.ranks import run_ranks\n"
        f"run_ranks({launcher(2)!r}, {command!r}, 2, {str(tmp_path).encode()!r}, 5.0)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, script], env=environ) as starter:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            if sum(bool(path.read_text()) for path in tmp_path.glob("[0-9]")) == 2:
                break
            time.sleep(0.02)
        assert there(tmp_path) == [0, 1]
        starter.send_signal(signal.SIGKILL)
    while left(tmp_path) and time.monotonic() < until:
        time.sleep(0.02)
    assert left(tmp_path) == []


@pytest.mark.parametrize(("command", "size"), [(["true"], 0), (["true"], -1), ([], 2)])
def test_no_rank_and_no_command_are_refused(command: list[str], size: int) -> None:
    with pytest.raises(RunnerError, match="pass at least one rank and a command"):
        run_ranks([], command, size, b"", 5.0)


def test_a_launcher_that_cannot_start_is_told(tmp_path: Path) -> None:
    ends = [sys.executable, "-c", "import sys; sys.exit('no such option')"]
    with pytest.raises(RanksError, match=r"^rank 0 of 2 did not start: no such option$"):
        run_ranks(ends, ["true"], 2, b"", 5.0)
    with pytest.raises(RanksError, match="no-launcher"):
        run_ranks([str(tmp_path / "no-launcher")], ["true"], 2, b"", 5.0)
