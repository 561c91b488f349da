"""One rank started by ``kvcache_engine.ranks``: its job, output, limits and end."""

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
"""The exit code of a rank that failed because another did (EX_TEMPFAIL)."""
LATE = 76
"""The exit code of a rank whose wait for another rank timed out."""

UNREAD = 74
"""The exit code of a rank whose output is no longer read (EX_IOERR)."""

_starter: socket.socket | None = None


class RanksError(RunnerError):
    """A rank failed or ended; all others were terminated. ``told``: each rank's standard error."""

    told: tuple[str, ...] = ()


def job_of_rank() -> bytes:
    """The job passed to ``run_ranks``; from now on, this process ends when its starter does. Rank 0 uses the
    starter's standard output and error; for the others, the starter receives only standard error.
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
    """Exit immediately, since a framework that waits for another rank would block the exit."""
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
    """The exit code of a rank after an error."""
    return LATE if error.late else LOST


def _end_with_starter(starter: socket.socket) -> NoReturn:
    with contextlib.suppress(OSError):
        while starter.recv(1):
            pass
    os._exit(LOST)


RESERVE = 2.0
"""The seconds of a long timeout that are reserved for ending."""


@dataclass(frozen=True, slots=True)
class Limits:
    """``timeout``: seconds from the moment at which a rank stops taking part until all have ended. That
    moment is when its process ends or, if it hangs, when another rank begins to wait for it. A third of the
    timeout, at most RESERVE, is reserved for finding the cause and for ending.
    """

    timeout: float

    def __post_init__(self) -> None:
        check_timeout(self.timeout, "ranks")

    @property
    def reserve(self) -> float:
        return min(self.timeout / 3, RESERVE)

    @property
    def waiting(self) -> float:
        """The seconds that ranks wait for each other: the timeout of their group."""
        return self.timeout - self.reserve

    @property
    def settling(self) -> float:
        """The seconds to look for the cause after a rank failed because of another."""
        return self.reserve / 4

    @property
    def ending(self) -> float:
        """The seconds for ranks to end, and for rank 0 to restore the terminal."""
        return self.reserve / 4
