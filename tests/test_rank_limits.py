"""Ranks that end in time: how a limit is divided, and what the watch over ranks does by the clock."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ml
from kvcache.runner.errors import RunnerError
from kvcache.runner.rank_limits import Limits
from kvcache.runner.rank_process import RankProcess
from kvcache.runner.ranks import LATE, LOST, RanksError, exit_code, run_ranks, watch

pytestmark = pytest.mark.skipif(not hasattr(os, "WUNTRACED"), reason="starts ranks, which needs POSIX")

TIMEOUTS = st.floats(0.1, 3600.0)
WAITS = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]


@given(TIMEOUTS)
def test_whatever_ends_a_rank_there_is_time_left_for_the_starter_to_exit(timeout: float) -> None:
    limits = Limits(timeout)
    ends = limits.poll + limits.hearing + limits.ending
    stopped = limits.waiting + ends
    late = limits.waiting + limits.settling(late=True) + ends
    lost = limits.waiting + limits.settling(late=False) + ends  # by one that waited, hangs and let go
    for what in (stopped, late, lost):
        assert what <= timeout - limits.reserve / 8 + 1e-9 * timeout


@given(TIMEOUTS)
def test_others_are_waited_for_most_of_a_long_limit_and_two_thirds_of_a_short_one(timeout: float) -> None:
    waiting = Limits(timeout).waiting
    assert waiting >= timeout * 0.66
    assert waiting >= timeout - 2
    assert 0 < waiting < timeout


@pytest.mark.parametrize("timeout", [0.0, -1.0, math.inf, math.nan])
def test_a_timeout_that_is_no_number_of_seconds_is_refused_before_anything_starts(
    timeout: float, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    with pytest.raises(RunnerError, match="a number of seconds > 0"):
        run_ranks([sys.executable, "-c", f"open({str(started)!r}, 'w')"], 1, b"job", timeout)
    assert not started.exists()


def test_a_wait_that_was_too_long_and_a_lost_rank_have_exit_codes_of_their_own() -> None:
    lost, late = ml.GroupError("lost"), ml.GroupError("late")
    late.late = True
    assert (exit_code(lost), exit_code(late)) == (LOST, LATE)


# The watch, by a clock that the test moves.


@dataclass
class Clock:
    """Time passes only in ``sleep``, and a little more than was asked for, as on a machine that is busy."""

    now: float = 100.0
    delay: float = 0.0
    events: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.delay
        while self.events and self.events[0][0] <= self.now:
            self.events.pop(0)[1]()


@pytest.fixture
def ranks() -> list[RankProcess]:
    """Two processes that wait until their standard input ends."""
    made = [RankProcess(i, 2) for i in range(2)]
    for rank in made:
        rank.start(WAITS, os.environ, b"job")
    yield made
    for rank in made:
        rank.signal(signal.SIGKILL)
        settled(rank, lambda rank=rank: rank.code is not None)
        rank.hear(10)
        rank.release()


def settled(rank: RankProcess, there: Callable[[], bool], now: float = 0.0) -> None:
    """Look at a rank until what was done to its process has arrived; bounded."""
    for _ in range(1000):
        rank.look(now)
        if there():
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"{rank} did not change within 10 s")


def stop(rank: RankProcess) -> None:
    rank.signal(signal.SIGSTOP)
    assert rank._process is not None
    os.waitid(os.P_PID, rank._process.pid, os.WSTOPPED | os.WNOWAIT)


def end(rank: RankProcess, number: int) -> None:
    rank.signal(number)
    assert rank._process is not None
    os.waitid(os.P_PID, rank._process.pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize("timeout", [1.0, 3.0, 60.0])
@pytest.mark.parametrize("delay", [0.0, 0.04])
def test_a_stopped_rank_is_given_up_when_others_would_be_and_not_before(
    ranks: list[RankProcess], timeout: float, delay: float
) -> None:
    limits, clock = Limits(timeout), Clock(delay=delay)
    stopped: list[float] = []
    clock.events.append((101.0, lambda: (stop(ranks[1]), stopped.append(clock.now))))
    with pytest.raises(RanksError, match=r"^rank 1 of 2 is stopped and was waited for as long as"):
        watch(ranks, limits, clock, clock.sleep)
    waited = clock.now - stopped[0]
    step = limits.poll + delay
    assert limits.waiting - step <= waited <= limits.waiting + step
    assert waited + limits.ending <= timeout


def test_a_rank_that_goes_on_in_time_is_not_given_up(ranks: list[RankProcess]) -> None:
    limits, clock = Limits(3.0), Clock()

    def go_on() -> None:
        ranks[1].signal(signal.SIGCONT)
        settled(ranks[1], lambda: not ranks[1].stopped, now=clock.now - 100)

    for i in range(4):  # stopped for 4 s of 8, and never for 1.5 s at a time
        clock.events += [(101.0 + 2 * i, lambda: stop(ranks[1])), (102.0 + 2 * i, go_on)]
    clock.events.append((115.0, lambda: [end(rank, signal.SIGTERM) for rank in ranks]))
    with pytest.raises(RanksError, match="ended by SIGTERM"):
        watch(ranks, limits, clock, clock.sleep)
    assert clock.now >= 115.0


def test_time_for_which_the_starter_itself_was_stopped_does_not_count(ranks: list[RankProcess]) -> None:
    limits, clock = Limits(3.0), Clock()

    def an_hour() -> None:
        stop(ranks[1])
        clock.now += 3600

    clock.events.append((101.0, an_hour))
    with pytest.raises(RanksError, match="is stopped"):
        watch(ranks, limits, clock, clock.sleep)
    assert clock.now >= 101.0 + 3600 + limits.waiting / 2


def test_a_killed_rank_is_told_at_once(ranks: list[RankProcess]) -> None:
    limits, clock = Limits(60.0), Clock()
    clock.events.append((101.0, lambda: end(ranks[1], signal.SIGKILL)))
    with pytest.raises(RanksError, match=r"^rank 1 of 2 was ended by SIGKILL"):
        watch(ranks, limits, clock, clock.sleep)
    assert clock.now <= 101.0 + 2 * limits.poll


EXITS = "import os, sys; sys.stdin.readline(); print('kvcache: {says}', file=sys.stderr); os._exit({code})"


@pytest.mark.parametrize(("code", "late"), [(LOST, False), (LATE, True)])
def test_the_cause_is_looked_for_no_longer_than_the_limit_has_room_for(code: int, late: bool) -> None:
    limits, clock = Limits(3.0), Clock()
    ranks = [RankProcess(i, 2) for i in range(2)]
    ranks[0].start([sys.executable, "-S", "-c", EXITS.format(says="waited", code=code)], os.environ, b"job")
    ranks[1].start(WAITS, os.environ, b"job")
    try:
        settled(ranks[0], lambda: ranks[0].code is not None)
        began = clock.now
        with pytest.raises(RanksError, match=r"^waited$"):
            watch(ranks, limits, clock, clock.sleep)
        took = clock.now - began
        assert limits.settling(late) <= took <= limits.settling(late) + 3 * limits.poll
    finally:
        end(ranks[1], signal.SIGKILL)
        for rank in ranks:
            settled(rank, lambda rank=rank: rank.code is not None)
            rank.hear(10)
            rank.release()


def test_a_rank_that_does_not_end_when_the_first_is_done_is_ended() -> None:
    limits, clock = Limits(3.0), Clock()
    ranks = [RankProcess(i, 2) for i in range(2)]
    ranks[0].start([sys.executable, "-S", "-c", EXITS.format(says="", code=0)], os.environ, b"job")
    ranks[1].start(WAITS, os.environ, b"job")
    try:
        settled(ranks[0], lambda: ranks[0].code is not None)
        with pytest.raises(RanksError, match=r"^rank 1 of 2 has not ended although rank 0 of 2 is done"):
            watch(ranks, limits, clock, clock.sleep)
        assert limits.waiting <= clock.now - 100.0 <= limits.waiting + 2 * limits.poll
    finally:
        end(ranks[1], signal.SIGKILL)
        for rank in ranks:
            settled(rank, lambda rank=rank: rank.code is not None)
            rank.hear(10)
            rank.release()


def test_a_rank_that_is_stopped_before_it_reads_its_job_does_not_hold_up_its_starter(tmp_path: Path) -> None:
    """A job of more bytes than a pipe takes."""
    there = str(tmp_path / "there")
    program = f"import os, signal; open({there!r}, 'w').close(); os.kill(os.getpid(), signal.SIGSTOP)"
    with pytest.raises(RanksError, match=r"^rank 0 of 1 is stopped"):
        run_ranks([sys.executable, "-S", "-c", program], 1, b"x" * (1 << 20), 0.5)
    assert Path(there).exists()


def test_what_a_rank_started_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """It has the rank's standard error open, so that this does not end with the rank."""
    program = (
        "import os, pathlib, subprocess, sys; print('kvcache: no room', file=sys.stderr, flush=True)\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(tmp_path)!r}, 'child').write_text(str(child.pid)); os._exit(1)"
    )
    with pytest.raises(RanksError, match=r"^no room$"):
        run_ranks([sys.executable, "-S", "-c", program], 1, b"job", 0.5)
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)  # it was there all the time


def test_all_ranks_are_gone_when_run_ranks_raises(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, signal\n"
        f"pathlib.Path({str(tmp_path)!r}, os.environ['RANK']).write_text(str(os.getpid()))\n"
        "if os.environ['RANK'] == '2': os.kill(os.getpid(), signal.SIGKILL)\n"
        "os.read(0, 1); signal.pause()"
    )
    with pytest.raises(RanksError, match="was ended by SIGKILL"):
        run_ranks([sys.executable, "-S", "-c", program], 3, b"job", 5.0)
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def test_the_benchmark_of_failures_measures_a_stopped_rank() -> None:
    """Its command is what the figures of the docs come from."""
    found = subprocess.run(
        [sys.executable, "-m", "benchmarks.rank_failures", "--help"],
        capture_output=True, text=True, timeout=60, check=True, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert "--how {stop,kill,hang}" in found.stdout
