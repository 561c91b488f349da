"""A rank as its starter sees it: a process that runs, is stopped or has ended, and what it said."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence

__all__ = ["RankProcess"]

_PREFIX = "kvcache: "
_TOLD = 1 << 16
"""Bytes of standard error that are kept of each rank."""


class RankProcess:
    """``code``: what it exited with, minus the signal's number where one ended it; None while it is there.

    By the clock that ``look`` is given: ``ended``, when that was seen, and ``stopped_since``, when it was
    last seen running before it was stopped (None while it runs).
    """

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size
        self.code: int | None = None
        self.ended = 0.0
        self.stopped_since: float | None = None
        self._looked = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._threads: list[threading.Thread] = []
        self._said = bytearray()

    def start(self, command: Sequence[str], environ: Mapping[str, str], job: bytes) -> None:
        """Run ``command``, with ``job`` as the first line of its standard input, which stays open."""
        process = self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=None if self.number == 0 else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=dict(environ),
            bufsize=0,
        )
        for work in (lambda: self._read(process), lambda: self._give(process, job.rstrip(b"\n") + b"\n")):
            self._threads.append(threading.Thread(target=work, daemon=True))
            self._threads[-1].start()

    def look(self, now: float = 0.0) -> None:
        """Note whether it has ended, was stopped or goes on."""
        before, self._looked = self._looked, now
        while self.code is None and self._process is not None:
            try:
                pid, status = os.waitpid(self._process.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                self._over(1, now)
                return
            if pid == 0:
                return
            if os.WIFSTOPPED(status):
                self.stopped_since = before
            elif os.WIFCONTINUED(status):
                self.stopped_since = None
            else:
                self._over(os.waitstatus_to_exitcode(status), now)

    def signal(self, number: int) -> None:
        """Send it a signal, if it is there."""
        if self.there:
            assert self._process is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def hear(self, seconds: float) -> None:
        """Wait so long for what an ended process has said, which others may hold back that it started."""
        for thread in self._threads if self.code is not None else ():
            thread.join(seconds)

    def release(self) -> None:
        """Give back what belongs to a process that has ended."""
        if self._process is None or self.code is None:
            return
        for pipe in (self._process.stdin, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    @property
    def there(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self.code is None

    @property
    def stopped(self) -> bool:
        return self.stopped_since is not None

    @property
    def told(self) -> str:
        """Its error, in one line: what it wrote to standard error last, frameworks' own words aside."""
        lines = [line for line in self.said.splitlines() if line.strip()]
        own = [line for line in lines if line.startswith(_PREFIX)] or lines
        return own[-1].removeprefix(_PREFIX).strip() if own else f"exit code {self.code}, and no word"

    @property
    def said(self) -> str:
        """The end of what it wrote to standard error."""
        return bytes(self._said).decode("utf-8", "replace")

    def __str__(self) -> str:
        return f"rank {self.number} of {self.size}"

    def _over(self, code: int, now: float) -> None:
        assert self._process is not None
        self.code, self.ended, self.stopped_since = code, now, None
        self._process.returncode = code

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        with contextlib.suppress(OSError, ValueError):
            while part := process.stderr.read(1 << 12):
                self._said += part
                del self._said[:-_TOLD]

    @staticmethod
    def _give(process: subprocess.Popen[bytes], job: bytes) -> None:
        """In a thread: one that is stopped before it reads would hold up whoever writes."""
        assert process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended already: that is seen soon
            process.stdin.write(job)
