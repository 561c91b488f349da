"""``kvcache generate --tensor-parallel``: the text, and what happens to all ranks when one ends or stops."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvcache_engine.rank import RanksError
from kvcache_engine.ranks import run_ranks

from ..engine import local_launcher
from ..engine.test_tensor_parallel import engine
from ..rigs.each_backend import need_backend
from .cli_rig import run

__all__ = ["engine"]
pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks in /proc")

LIMIT = 6.0
GENERATE = [sys.executable, "-m", "kvcache_engine", "generate", "--dtype", "f32"]


@pytest.fixture
def mlx() -> None:
    """Ranks of MLX start in less time than those of torch."""
    need_backend("mlx")


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def generated(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*GENERATE, *options], env=environment(), capture_output=True, text=True, timeout=120, check=False
    )


def here(*options: str) -> Any:
    """The same in this process, without ranks: exit code, stdout and stderr."""
    return run("generate", "--dtype", "f32", *options)


# Processes, by /proc.


def ranks_below(pid: int) -> dict[int, int]:
    """{rank: process} of what a launcher has started that a process has started."""
    found: dict[int, int] = {}
    waiting = [pid]
    while waiting:
        process = Path(f"/proc/{waiting.pop()}")
        with contextlib.suppress(OSError):
            for children in process.glob("task/*/children"):  # a list for each thread that has started some
                waiting += map(int, children.read_text().split())
            variables = dict(v.split(b"=", 1) for v in (process / "environ").read_bytes().split(b"\0") if v)
            if rank := variables.get(b"RANK", variables.get(b"MLX_RANK")):
                found[int(rank)] = int(process.name)
    return found


def alive(pid: int) -> bool:
    """Whether it runs or is stopped; a zombie does neither."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def gone(pids: list[int], seconds: float = 5.0) -> bool:
    until = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(alive(pid) for pid in pids)


@dataclass
class Running:
    """A command whose ranks are in the middle of a text."""

    process: subprocess.Popen[bytes]
    ranks: dict[int, int]

    def ended(self, within: float) -> tuple[int, str]:
        """(exit code, standard error)."""
        _, told = self.process.communicate(timeout=within)
        return self.process.returncode, told.decode()


@pytest.fixture
def endless(mlx: None, make_model: Callable[..., Path]) -> Iterator[Callable[[], Running]]:
    """``endless()`` starts a text that takes minutes, and waits for its beginning.

    It is drawn without a seed: ranks that drew different tokens would be out of step, which is an error.
    """
    started: list[Running] = []
    model = make_model(max_position_embeddings=20_000, eos_token_id=None)

    def start() -> Running:
        what = ["--model", str(model), "--prompt", "a", "--max-tokens", "19000", "--temperature", "1"]
        process = subprocess.Popen(
            [*GENERATE, *what, "--backend", "mlx", "--tensor-parallel", "2", "--timeout", str(LIMIT)],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        running = Running(process, {})
        started.append(running)
        begun = b""
        while len(begun) < 4 and (part := os.read(process.stdout.fileno(), 64)):
            begun += part
        assert len(begun) >= 4, process.stderr.read() if process.stderr else ""
        running.ranks = ranks_below(process.pid)
        assert sorted(running.ranks) == [0, 1]
        return running

    yield start
    for running in started:
        for pid in (running.process.pid, *running.ranks.values()):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        running.process.communicate()


# The text.


@pytest.mark.parametrize("engine", ["torch"], indirect=True)
def test_two_ranks_write_the_text_of_one(engine: str) -> None:
    options = ("--prompt", "And God said", "--prompt", "And God saw", "--max-tokens", "6", "--json")
    options = (*options, "--temperature", "1", "--seed", "7")
    alone = json.loads(here(*options, "--backend", "numpy").stdout)
    both = generated(*options, "--backend", engine, "--tensor-parallel", "2")
    assert both.returncode == 0, both.stderr
    record = json.loads(both.stdout)
    assert record["ranks"] == 2
    assert record["outputs"] == alone["outputs"]
    assert record["statistics"]["reused_tokens"] == 3
    assert record["statistics"]["cache_bytes"] * 2 == alone["statistics"]["cache_bytes"]


def test_ranks_of_another_launcher_join_as_they_are(mlx: None) -> None:
    """As mlx.launch starts them: the command finds its rank in the environment, and starts none itself."""
    options = ["--prompt", "And God said", "--max-tokens", "4", "--quiet", "--backend", "mlx"]
    with local_launcher.local_ranks(2) as variables:
        ranks = [
            subprocess.Popen(
                [*GENERATE, *options, "--tensor-parallel", "2"],
                env={**environment(), **{k: v for k, v in own.items() if k.startswith("MLX_")}},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for own in variables
        ]
        told = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told
    assert told[0][0] == here(*options[:-1], "numpy").stdout
    assert told[1][0] == ""


# When one rank ends or stops.


def test_a_killed_rank_ends_all_at_once_with_one_line(endless: Callable[[], Running]) -> None:
    running = endless()
    os.kill(running.ranks[0], signal.SIGKILL)
    code, told = running.ended(within=LIMIT + 10)
    assert code == 1
    assert told.startswith("kvcache: rank 0 of 2 was killed, and all others with it")
    assert len(told.splitlines()) == 1, told
    assert gone(list(running.ranks.values()))


def test_a_frozen_rank_ends_all_within_the_limit_with_one_line(endless: Callable[[], Running]) -> None:
    running = endless()
    os.kill(running.ranks[1], signal.SIGSTOP)
    code, told = running.ended(within=LIMIT + 10)
    assert code == 1
    assert re.search(r"rank 0 of 2 has waited \S+ s for the other ranks", told), told
    assert len(told.splitlines()) == 1, told
    assert gone(list(running.ranks.values()))


def test_ranks_whose_text_nobody_reads_end_without_a_word(endless: Callable[[], Running]) -> None:
    running = endless()
    running.process.stdout.close()
    running.process.stdout = None
    assert running.ended(within=LIMIT + 10) == (1, "")
    assert gone(list(running.ranks.values()))


def test_a_rank_stopped_for_less_than_the_limit_goes_on_until_ctrl_c_ends_all_and_says_how_far_they_came(
    endless: Callable[[], Running],
) -> None:
    running = endless()
    os.kill(running.ranks[1], signal.SIGSTOP)
    time.sleep(LIMIT / 4)
    os.kill(running.ranks[1], signal.SIGCONT)
    for _ in range(3):  # the first may have been there
        assert os.read(running.process.stdout.fileno(), 4096)
    assert running.process.poll() is None
    running.process.send_signal(signal.SIGINT)
    code, told = running.ended(within=20)
    assert code == 130
    assert told.startswith("kvcache: interrupted after ")
    assert len(told.splitlines()) == 1, told
    assert gone(list(running.ranks.values()))


# Without a supervisor: what a group does by itself.


def started(engine: str, program: str, job: bytes) -> None:
    launcher = local_launcher.launcher(2, *local_launcher.IMPORTS[engine])
    run_ranks(launcher, [sys.executable, "-P", "-c", program], 2, job, 60.0)


ALONE = """
import os, pathlib, sys, time
import ml
from kvcache_engine.rank import job_of_rank, leave
name, folder, *ways = job_of_rank().decode().split(":")
there = pathlib.Path(folder, "told")
backend = ml.open_backend(name)
for how in ways:
    first = os.environ["RANK"] == "0"
    group = backend.distributed(timeout=1.0 if first and how == "late" else 30.0)
    ctx = backend.new_context()
    x = ctx.full((64,), 1.0, ml.DType.F32)
    assert group.all_reduce(ctx, x).to_numpy()[0] == 2
    if first:
        for op in range(2):
            try:
                group.all_reduce(ctx, x).to_numpy()
            except ml.GroupError as error:
                print(how, error, file=sys.stderr)
                assert error.late == (how == "late")
            else:
                raise AssertionError("nothing was raised")
        there.touch()
    elif how == "ended":
        leave(0)
    elif how == "gave up":
        group.abandon("forward", MemoryError("no memory"))
        try:
            group.all_reduce(ctx, x)
        except ml.GroupError as error:
            print(error, file=sys.stderr)
    while not there.exists():
        time.sleep(0.01)
    group.close()
backend.close()
leave(3)
"""


@pytest.mark.parametrize(
    ("engine", "ways"),
    [("torch", ("late", "gave up", "ended")), ("mlx", ("late",)), ("mlx", ("gave up",))],
    indirect=["engine"],
)
def test_an_operation_raises_when_another_rank_is_late_or_gives_up_or_has_ended(
    engine: str, ways: tuple[str, ...], tmp_path: Path
) -> None:
    """A killed rank of MLX ends the command above, whose connections are cut below."""
    with pytest.raises(RanksError) as raised:
        started(engine, ALONE, ":".join((engine, str(tmp_path), *ways)).encode())
    for how in ways:
        told = "lost another rank, before its timeout of 30 s"
        if how == "late":
            told = "has waited 1 s for the other ranks"
        where = rf"^{how} (all_reduce|to_numpy|compute): rank 0 of 2 {told}"
        assert len(re.findall(where, raised.value.told[0], re.MULTILINE)) == 2, raised.value.told
    gave_up = r"^forward: rank 1 of 2 failed .*\(MemoryError: no memory\)"
    assert len(re.findall(gave_up, raised.value.told[1], re.MULTILINE)) == ("gave up" in ways)


CUT = """
import os, sys, time
import ml
from kvcache_engine.rank import job_of_rank, leave
job_of_rank()
backend = ml.open_backend("mlx")
group = backend.distributed(timeout=20.0 if os.environ["RANK"] == "0" else 2.0)
ctx = backend.new_context()
x = ctx.full((64,), 1.0, ml.DType.F32)
try:
    for step in range(1000):
        x = group.all_reduce(ctx, x).scale(ctx, 0.5)
        if group.rank == 1 and step == 20:
            with group.waiting("test"):  # one that hangs while it waits: its own limit cuts its connections
                time.sleep(60)
except ml.GroupError as error:
    backend.close()
    print(error, file=sys.stderr)
    leave(3)
"""


def test_a_backend_closes_while_exchanges_are_under_way_that_will_never_end(mlx: None) -> None:
    with pytest.raises(RanksError, match=r"rank 0 of 2 lost another rank, before its timeout of 20 s"):
        started("mlx", CUT, b"job")
