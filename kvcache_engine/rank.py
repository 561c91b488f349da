"""One rank of those that ``kvcache_engine.ranks`` has had started: its job, output, limits and end."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import ml
from kvcache_engine.errors import RunnerError
from ml.distributed import check_timeout, launched

__all__ = ["ADDRESS", "LATE", "LOST", "UNREAD", "Limits", "RanksError", "exit_code", "job_of_rank", "leave"]

ADDRESS = "KVCACHE_RANKS"
"""The variable with the path of the socket at which a rank reports to its starter."""
LOST = 75
"""What a rank exits with that failed because another did (EX_TEMPFAIL)."""
LATE = 76
"""What a rank exits with that has waited for another for as long as its limit let it."""

UNREAD = 74
"""What a rank exits with whose output nobody reads any more (EX_IOERR)."""

_starter: socket.socket | None = None


class RanksError(RunnerError):
    """A rank failed or ended; all others were ended. ``told``: what each wrote to standard error."""

    told: tuple[str, ...] = ()


def job_of_rank() -> bytes:
    """The job that ``run_ranks`` was given; from now on this process ends as soon as its starter has.

    Standard output and error are the starter's for rank 0; of the others it hears standard error alone.
    """
    global _starter
    address = os.environ.get(ADDRESS, "")
    number = (launched() or (0, 1))[0]
    _starter = socket.socket(socket.AF_UNIX)
    try:
        _starter.connect(address)
        _starter.sendall(f"{number} {os.getpid()}\n".encode())
        _, streams, _, _ = socket.recv_fds(_starter, 1, 2)
        job = Path(address).with_name("job").read_bytes()
    except OSError as error:
        raise RanksError(f"{ADDRESS}={address!r}: no launcher is running there") from error
    for stream, place in zip(streams, (1, 2), strict=True):
        os.dup2(stream, place)
        os.close(stream)
    threading.Thread(target=_end_with_starter, args=(_starter,), name="starter", daemon=True).start()
    return job


def leave(code: int) -> NoReturn:
    """End at once: a framework that still waits for another rank would not let this one go."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = code or UNREAD
    sys.stderr.flush()
    if _starter is not None:
        with contextlib.suppress(OSError):
            _starter.sendall(f"{code}\n".encode())
    os._exit(code)


def exit_code(error: ml.GroupError) -> int:
    """What a rank exits with after it."""
    return LATE if error.late else LOST


def _end_with_starter(starter: socket.socket) -> NoReturn:
    with contextlib.suppress(OSError):
        while starter.recv(1):
            pass
    os._exit(LOST)


RESERVE = 2.0
"""Seconds of a long limit that are kept for ending."""


@dataclass(frozen=True, slots=True)
class Limits:
    """``timeout``: seconds from the moment at which a rank stops taking part to the end of all of them.

    That moment is when its process ends; for one that is there and does not come, when another begins to
    wait for it. A third of the timeout, at most RESERVE, is kept for finding the cause and for ending.
    """

    timeout: float

    def __post_init__(self) -> None:
        check_timeout(self.timeout, "ranks")

    @property
    def reserve(self) -> float:
        return min(self.timeout / 3, RESERVE)

    @property
    def waiting(self) -> float:
        """How long ranks wait for another: the timeout of their group."""
        return self.timeout - self.reserve

    @property
    def settling(self) -> float:
        """How long to look for the cause after a rank failed for want of another."""
        return self.reserve / 4

    @property
    def ending(self) -> float:
        """How long the ranks have to be gone, and rank 0 to put the terminal back."""
        return self.reserve / 4
