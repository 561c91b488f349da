"""Starting the ranks of a group on this machine, watching them, and ending all when one fails.

torchrun and mlx.launch start ranks too, and ranks that they start are as good. Here all backends get the
same, and something more: a rank that is stopped (and will not end by itself) is noticed, nothing outlives
whoever started it, and what went wrong is told in one line.

A rank reads its job, a line, from standard input, which stays open for as long as its starter lives.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import ml
from kvcache.runner.errors import RunnerError
from ml.distributed import local_ranks

__all__ = ["LOST", "RanksError", "job_of_rank", "run_ranks"]

LOST = 75
"""What a rank exits with that failed because another did (EX_TEMPFAIL)."""

_POLL = 0.05
_SETTLE = 1.0
"""Seconds in which others may tell the cause after one has failed for want of another."""
_GRACE = 2.0
"""Seconds in which rank 0 may put the terminal back."""
_PREFIX = "kvcache: "
_TOLD = 1 << 16
"""Bytes of standard error that are kept of each rank."""


class RanksError(RunnerError):
    """A rank failed, ended or stopped; all others were ended. ``told``: what each wrote to standard error."""

    told: tuple[str, ...] = ()


def run_ranks(
    command: Sequence[str], size: int, job: bytes, timeout: float, environ: Mapping[str, str] = os.environ
) -> None:
    """Run ``command`` as ``size`` ranks of this machine until all are done; rank 0 writes to our stdout.

    ``job``: a line that each reads with :func:`job_of_rank`. A rank that fails with GroupError exits with
    LOST: then another one is looked for as the cause. ``timeout``: seconds that a rank may be
    stopped for; that a rank waits for others no longer is up to the group it joins.

    Raises RanksError, and KeyboardInterrupt on Ctrl-C: no rank is left then.
    """
    if not hasattr(os, "WUNTRACED"):
        raise ml.NotSupportedError("starting ranks needs a POSIX system; start them with torchrun")
    with local_ranks(size) as variables:
        ranks = [_Rank(i, size) for i in range(size)]
        try:
            for rank, own in zip(ranks, variables, strict=True):
                rank.start(command, {**environ, **_shared(environ, size), **own}, job)
            _watch(ranks, timeout)
        except KeyboardInterrupt:
            ranks[0].ask_to_end()
            raise KeyboardInterrupt(ranks[0].told) from None
        except RanksError as error:
            error.told = tuple(rank.said for rank in ranks)
            raise
        finally:
            for rank in ranks:
                rank.kill()
            if (ranks[0].code or 0) < 0 and sys.stdout.isatty():
                sys.stdout.write("\x1b[?25h\n")  # it may have hidden the cursor
                sys.stdout.flush()


def job_of_rank() -> bytes:
    """The line that ``run_ranks`` gave; from now on this process ends as soon as its starter has."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise RanksError("this process is a rank that something else starts; it was given no job")
        line += byte
    threading.Thread(target=_end_with_starter, name="starter", daemon=True).start()
    return bytes(line)


def _end_with_starter() -> NoReturn:
    with contextlib.suppress(OSError):
        while os.read(0, 1 << 12):
            pass
    os._exit(LOST)


def _shared(environ: Mapping[str, str], size: int) -> dict[str, str]:
    """The same modules as here, and threads for each rank's part of the machine."""
    found = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if "OMP_NUM_THREADS" not in environ:
        found["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // size))
    return found


def _watch(ranks: Sequence[_Rank], timeout: float) -> None:
    """Return when all have ended well; RanksError as soon as one has not."""
    while not all(rank.code == 0 for rank in ranks):
        time.sleep(_POLL)
        for rank in ranks:
            rank.look()
        if any(rank.code for rank in ranks):
            _settle(ranks)
            _fail(ranks, timeout)
        if any(rank.stopped_for >= timeout for rank in ranks):
            _fail(ranks, timeout)


def _settle(ranks: Sequence[_Rank]) -> None:
    """Let the cause come to light, and what came of it a moment later."""
    until = time.monotonic() + _SETTLE
    known = False
    while not known and time.monotonic() < until and any(rank.code is None for rank in ranks):
        known = any(rank.stopped or rank.code not in (None, 0, LOST) for rank in ranks)
        time.sleep(_POLL)
        for rank in ranks:
            rank.look()


def _fail(ranks: Sequence[_Rank], timeout: float) -> NoReturn:
    """End all, and say what it came from: a signal, a rank that is stopped, or what a rank said itself."""
    cause = _cause(ranks, timeout)
    for rank in ranks[1:]:
        rank.kill()
    if ranks[0].code is None and not ranks[0].stopped and sys.stdout.isatty():
        ranks[0].ask_to_end()  # which leaves the terminal as it was
    raise RanksError(cause)


def _cause(ranks: Sequence[_Rank], timeout: float) -> str:
    failed = [rank for rank in ranks if rank.code]
    for rank in failed:
        if rank.code is not None and rank.code < 0:
            return (
                f"{rank} was ended by {_signal_name(-rank.code)}, and all others with it; where nobody did "
                "that, the machine may be out of memory: take a smaller --capacity or a narrower --dtype"
            )
    own = [rank for rank in failed if rank.code != LOST]
    stopped = [rank for rank in ranks if rank.stopped]
    if stopped and not own:
        return (
            f"{stopped[0]} has been stopped for longer than the timeout of {timeout:g} s; all ranks were "
            "ended, run it again"
        )
    told = own or failed
    first = min(told, key=lambda rank: rank.ended)
    alone = first.number > 0 and (len(told) == 1 or len({rank.told for rank in told}) > 1)
    return f"{first}: {first.told}" if alone else first.told


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


@dataclass
class _Rank:
    """One process. ``code``: what it exited with, minus the signal's number where one ended it."""

    number: int
    size: int
    code: int | None = None
    ended: float = 0.0
    stopped: bool = False
    stopped_for: float = 0.0
    _process: subprocess.Popen[bytes] | None = None
    _reader: threading.Thread | None = None
    _said: bytearray = field(default_factory=bytearray)
    _looked: float = 0.0

    def start(self, command: Sequence[str], environ: Mapping[str, str], job: bytes) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=None if self.number == 0 else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=dict(environ),
            bufsize=0,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already: that is seen soon
            self._process.stdin.write(job.rstrip(b"\n") + b"\n")

    def look(self) -> None:
        """Whether it has ended, was stopped or goes on.

        Time for which this process was stopped itself (Ctrl-Z stops all of them) does not count.
        """
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, 4 * _POLL), now
        while self.code is None and self._process is not None:
            try:
                pid, status = os.waitpid(self._process.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                self._over(1)
                return
            if pid == 0:
                break
            if os.WIFSTOPPED(status):
                self.stopped, self.stopped_for = True, 0.0
            elif os.WIFCONTINUED(status):
                self.stopped, self.stopped_for = False, 0.0
            else:
                self._over(os.waitstatus_to_exitcode(status))
                return
        if self.stopped:
            self.stopped_for += passed

    def ask_to_end(self) -> None:
        """SIGTERM, and a while to obey."""
        self._signal(signal.SIGTERM)
        until = time.monotonic() + _GRACE
        while self.code is None and self._process is not None and time.monotonic() < until:
            time.sleep(_POLL)
            self.look()

    def kill(self) -> None:
        """Make sure that it is gone, and give back what belongs to it. Safe to call at any time."""
        if self._process is None:
            return
        if self.code is None:
            self._signal(signal.SIGKILL)
            self._over(self._process.wait())
        if self._reader is not None:
            self._reader.join(_GRACE)
        for pipe in (self._process.stdin, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    @property
    def told(self) -> str:
        """Its error, in one line: what it wrote to standard error last, frameworks' own words aside."""
        if self.code is not None and self._reader is not None:
            self._reader.join(_GRACE)
        lines = [line for line in self.said.splitlines() if line.strip()]
        own = [line for line in lines if line.startswith(_PREFIX)] or lines
        return own[-1].removeprefix(_PREFIX).strip() if own else f"exit code {self.code}, and no word"

    @property
    def said(self) -> str:
        """The end of what it wrote to standard error."""
        return bytes(self._said).decode("utf-8", "replace")

    def __str__(self) -> str:
        return f"rank {self.number} of {self.size}"

    def _signal(self, number: int) -> None:
        if self._process is not None and self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def _over(self, code: int) -> None:
        assert self._process is not None
        self.code, self.ended, self.stopped = code, time.monotonic(), False
        self._process.returncode = code

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        with contextlib.suppress(OSError, ValueError):
            while part := self._process.stderr.read(1 << 12):
                self._said += part
                del self._said[:-_TOLD]
