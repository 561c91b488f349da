"""Ranks that meet before MLX joins them, and what they say when one of them does not come."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

import pytest

import ml
from backends.mlx.rendezvous import interrupted, rendezvous
from ml.distributed import free_ports

from ..engine.local_launcher import local_ranks
from ..rigs.each_backend import need_backend


def hosts(size: int) -> list[list[str]]:
    return [[f"127.0.0.1:{port}"] for port in free_ports(size)]


def together(rings: Mapping[int, Sequence[Sequence[str]]], seconds: float = 30.0) -> dict[int, str | None]:
    """What each rank was told that calls with its ring; None where it met all others."""
    told: dict[int, str | None] = {}

    def run(rank: int) -> None:
        try:
            rendezvous(rings[rank], rank, seconds)
        except ml.GroupError as error:
            told[rank] = f"{'late' if error.late else 'lost'}: {error}"
        else:
            told[rank] = None

    threads = [threading.Thread(target=run, args=(rank,)) for rank in rings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return told


@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_ranks_meet_and_leave_their_addresses_free(size: int) -> None:
    ring = hosts(size)
    assert together(dict.fromkeys(range(size), ring)) == dict.fromkeys(range(size))
    for (address,) in ring:
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", int(address.split(":")[1])))
            again.listen()


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_ranks_say_who_is_missing_next_to_them(missing: int) -> None:
    ring = hosts(3)
    told = together({rank: ring for rank in range(3) if rank != missing}, 0.3)
    for rank, words in told.items():
        assert words is not None
        assert words.startswith(f"late: distributed: rank {rank} of 3 could not join the ring within 0.3 s (")
        assert f"rank {missing} ({ring[missing][0]}) did not connect" in words


def test_a_call_from_something_else_is_ignored() -> None:
    ring = hosts(2)
    found: dict[int, str | None] = {}
    waiting = threading.Thread(target=lambda: found.update(together({0: ring})))
    waiting.start()
    address = ("127.0.0.1", int(ring[0][0].split(":")[1]))
    with socket.socket() as other:
        for _ in range(500):
            if other.connect_ex(address) == 0:
                break
            time.sleep(0.01)
        other.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert together({1: ring}) == {1: None}
        waiting.join(60)
    assert found == {0: None}


def test_ranks_of_two_host_files_do_not_meet() -> None:
    ring = hosts(2)
    other = [ring[0], ring[1], hosts(1)[0]]
    told = together({0: ring, 1: other}, 0.4)
    assert all(words is not None and words.startswith("late") for words in told.values())


def test_an_address_that_cannot_be_used_is_told() -> None:
    ring = hosts(2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(ring[0][0].split(":")[1])))
        taken.listen()
        with pytest.raises(ml.GroupError, match=r"its address 127\.0\.0\.1:\d+ cannot be used"):
            rendezvous(ring, 0, 1.0)
    for wrong in ("localhost", "localhost:99999"):
        with pytest.raises(ml.GroupError, match=f"'{wrong}' in MLX_HOSTFILE is not an address host:port"):
            rendezvous([[wrong], ring[1]], 0, 1.0)


def test_a_call_that_waits_is_interrupted_and_the_alarm_of_others_is_put_back() -> None:
    def theirs(*_: object) -> None:
        raise AssertionError("this alarm is an hour away")

    before = signal.signal(signal.SIGALRM, theirs)
    signal.setitimer(signal.ITIMER_REAL, 3600)
    reader, writer = os.pipe()
    cut: list[bool] = []

    def interrupt(*_: object) -> None:
        cut.append(True)
        raise InterruptedError

    try:
        with interrupted(time.monotonic() + 0.05):
            signal.signal(signal.SIGALRM, interrupt)
            with pytest.raises(InterruptedError):
                os.read(reader, 1)
        assert cut
        assert signal.getsignal(signal.SIGALRM) is theirs
        assert 3000 < signal.getitimer(signal.ITIMER_REAL)[0] <= 3600
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("engine", ["torch", "mlx"])
def test_a_rank_whose_other_never_starts_waits_no_longer_than_its_limit(engine: str, rank: int) -> None:
    """torch has a wait of its own."""
    need_backend(engine)
    told = rf"^distributed: rank {rank} .*within 0.3 s.*rank {1 - rank} "
    with (
        local_ranks(2) as variables,
        patch.dict(os.environ, variables[rank]),
        ml.open_backend(engine) as backend,
        pytest.raises(ml.GroupError, match=told) as raised,
    ):
        backend.distributed(timeout=0.3)  # type: ignore[attr-defined]
    assert raised.value.late


# Processes of MLX.

JOINS = """
import os, sys
import ml
from backends.mlx import distributed
distributed.JOINING, limit = map(float, sys.argv[1:])
with ml.open_backend("mlx") as backend:
    try:
        group = backend.distributed(timeout=limit)
    except ml.GroupError as error:
        print("late" if error.late else "lost", error, flush=True)
        os._exit(3)
    group.barrier()
    print("joined", group.rank, flush=True)
"""
ARRIVES = """
import os, sys
from backends.mlx.rendezvous import rendezvous
from ml.distributed import ring_hosts
print("comes", flush=True)
rendezvous(ring_hosts(), int(os.environ["MLX_RANK"]), 30.0)
sys.stdin.read()
"""


@pytest.fixture
def mlx() -> None:
    need_backend("mlx")


def started(program: str, variables: dict[str, str], *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", program, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def told(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        words, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, words


def test_ranks_that_start_one_after_the_other_join(mlx: None) -> None:
    """Later than MLX itself would wait for is not tried here: that is 15 s."""
    with local_ranks(2) as variables:
        first = started(JOINS, variables[1], "5", "60")
        time.sleep(1.5)
        second = started(JOINS, variables[0], "5", "60")
        found = [told(process) for process in (first, second)]
    assert found == [(0, "joined 1\n"), (0, "joined 0\n")]


def test_a_rank_that_came_and_goes_no_further_does_not_hold_up_mlx(mlx: None) -> None:
    """It has met the others and does not join: MLX itself waits for that without a limit."""
    with local_ranks(2) as variables, started(ARRIVES, variables[1]) as arrives:
        try:
            assert arrives.stdout is not None
            assert arrives.stdout.readline() == "comes\n"
            code, words = told(started(JOINS, variables[0], "1", "2"))
        finally:
            arrives.kill()
    assert code == 3
    assert words.startswith("late distributed: MLX could not join rank 0 to the others (")


def test_the_command_ends_in_one_line_where_mlx_launch_has_lost_a_rank(mlx: None, tmp_path: Path) -> None:
    pytest.importorskip("typer")
    file = tmp_path / "hosts.json"
    file.write_text(json.dumps(hosts(2)), encoding="utf-8")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "kvcache_engine", "generate", "--prompt", "And", "--backend", "mlx"),
            *("--tensor-parallel", "2", "--timeout", "1"),
        ],
        env={**os.environ, "MLX_HOSTFILE": str(file), "MLX_RANK": "0"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        "kvcache: distributed: rank 0 of 2 could not join the ring within 0.667 s ("
    )
    assert len(done.stderr.splitlines()) == 1
