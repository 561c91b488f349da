"""Starts the ranks of a group on this machine with their framework's launcher, watches them, and ends them
together. torchrun and mlx.launch start the ranks; each reports its process id and its exit code over a
socket. This adds what the launchers lack (measured in docs/devices.md): all ranks end in time, even stopped
ones or those whose starter was killed, rank 0 has the terminal, and the cause is one line.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import ml
from kvcache_engine.errors import RunnerError
from kvcache_engine.rank import ADDRESS, LATE, LOST, UNREAD, Limits, RanksError

__all__ = ["run_ranks"]

_PREFIX = "kvcache: "
_POLL = 0.02
_GRACE = 4.0
"""Seconds for ranks to end after Ctrl-C."""
_INTERRUPTED = 130
_KEPT = 1 << 16
"""The bytes of standard error kept for each rank."""


def run_ranks(
    launcher: Sequence[str],
    command: Sequence[str],
    size: int,
    job: bytes,
    timeout: float,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Run ``command`` as ``size`` ranks with ``launcher`` until all have finished; rank 0 writes to our
    stdout. ``launcher``: the words before the command, from ``ml.BackendSpec.launcher(size)``. A rank reads
    ``job`` with ``kvcache_engine.rank.job_of_rank`` and ends with ``leave``. ``timeout``: seconds from a
    rank's failure until this raises, with all ranks killed. To detect a stopped or hanging rank, the ranks
    use ``Limits(timeout).waiting`` as the timeout of their group; on GroupError they leave with its
    ``exit_code``, and the cause is then searched among the other ranks. After one rank has finished, the
    others have the same time to finish, except rank 0, whose output may be read slowly.

    Raises RanksError, KeyboardInterrupt on Ctrl-C, and BrokenPipeError if rank 0's output is not read; all
    ranks have then ended. Raises ShapeError for a timeout that is not above 0 and at most a week, RunnerError
    without a rank or a command.
    """
    if not hasattr(socket, "AF_UNIX"):
        raise ml.NotSupportedError("starting ranks needs a POSIX system; start them with torchrun")
    if size < 1 or not command:
        raise RunnerError(
            f"run_ranks: size={size}, command={command!r:.60}; pass at least one rank and a command"
        )
    limits = Limits(timeout)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, _Ranks(Path(folder), size, job) as ranks:
        try:
            ranks.start([*launcher, *command], environ)
            ranks.watch(limits)
        except KeyboardInterrupt:
            ranks.end(_GRACE, ask=True)
            raise KeyboardInterrupt(ranks.told(0)) from None
        except SystemExit:  # terminated: rank 0 shows what it has
            ranks.end(_GRACE, ask=True)
            raise
        except RanksError as error:
            ranks.end(limits.ending, ask=sys.stdout.isatty())
            error.told = tuple(rank.said.decode("utf-8", "replace") for rank in ranks.all)
            if sys.stdout.isatty():
                sys.stdout.write("\x1b[?25h\n")  # rank 0 may have hidden the cursor
                sys.stdout.flush()
            raise
        finally:
            ranks.end(limits.ending)


class _Rank:
    """``code``: its exit code; None while it runs, and if it ended without reporting one."""

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size
        self.pid: int | None = None
        self.code: int | None = None
        self.ended = False
        self.over_at = 0.0
        self.said = bytearray()

    @property
    def there(self) -> bool:
        return self.pid is not None and not self.ended

    @property
    def vanished(self) -> bool:
        return self.ended and self.code is None

    @property
    def failed(self) -> bool:
        return self.ended and self.code != 0

    @property
    def own(self) -> bool:
        """Whether it failed by itself, not because of another rank."""
        return self.failed and self.code not in (LOST, LATE, _INTERRUPTED)

    def signal(self, number: int) -> None:
        if self.there and self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def __str__(self) -> str:
        return f"rank {self.number} of {self.size}"


class _Ranks:
    """A launcher, the ranks that have reported, and the standard error of all of them."""

    def __init__(self, folder: Path, size: int, job: bytes) -> None:
        self.all = [_Rank(number, size) for number in range(size)]
        self._launcher: subprocess.Popen[bytes] | None = None
        self._says = bytearray()
        self._folder = folder
        (folder / "job").write_bytes(job)
        self._waiting = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / "ranks"))
        self._listener.listen(size)
        self._sources: set[IO[bytes] | socket.socket] = set()
        self._open(self._listener, self._join)

    def __enter__(self) -> _Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for source in self._sources:
            source.close()
        self._waiting.close()

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start the launcher in a separate session: this process handles Ctrl-C and asks rank 0 to show what
        it has.
        """
        own = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), ADDRESS: self._address}
        if "OMP_NUM_THREADS" not in environ:
            own["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // len(self.all)))
        try:
            self._launcher = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # mlx.launch busy-waits on a closed one
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={**environ, **own},
                start_new_session=True,
            )
        except OSError as error:
            raise RanksError(f"the launcher cannot be started: {error}") from error
        self._hear(self._launcher.stderr, self._says)

    def watch(self, limits: Limits) -> None:
        """Return when all have finished; raise RanksError as soon as one has failed."""
        while not all(rank.code == 0 for rank in self.all):
            self._look(_POLL)
            if any(rank.failed for rank in self.all):
                until = time.monotonic() + limits.settling
                while not any(rank.own for rank in self.all) and time.monotonic() < until:
                    self._look(_POLL)
                if self.all[0].code == UNREAD:
                    raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
                raise RanksError(self._cause())
            self._check_left_behind(limits)
            if self._launcher is not None and self._launcher.poll() is not None:
                self._check_begun()

    def end(self, seconds: float, ask: bool = False) -> None:
        """End all running ranks within ``seconds``; a process blocked in the kernel ends when it is released.
        ``ask``: first send SIGTERM to rank 0, so that it restores the terminal within half of the time.
        """
        first, until = self.all[0], time.monotonic() + seconds
        if ask and first.there:  # while the others run, or it might report their end instead of its own
            first.signal(signal.SIGTERM)
            self._gone([first], until - seconds * 3 / 4)
            for rank in self.all[1:]:
                rank.signal(signal.SIGKILL)
            self._gone([first], until - seconds / 2)  # it no longer waits for the others
        for rank in self.all:
            rank.signal(signal.SIGKILL)
        if self._launcher is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                if all(rank.code == 0 for rank in self.all):
                    self._launcher.wait(seconds / 2)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._launcher.pid, signal.SIGKILL)
            self._launcher.wait()
            if self._launcher.stdin is not None:
                self._launcher.stdin.close()
            self._launcher = None
        self._gone(self.all, until)

    def told(self, number: int) -> str:
        """A rank's error in one line: its last words on standard error, without those of frameworks."""
        return _last_line(self.all[number].said) or f"exit code {self.all[number].code}, and no word"

    @property
    def _address(self) -> str:
        return str(self._folder / "ranks")

    def _cause(self) -> str:
        """The cause: a rank that was killed, or the error of the rank that failed by itself."""
        failed = [rank for rank in self.all if rank.failed]
        first = min([rank for rank in failed if rank.own] or failed, key=lambda rank: rank.over_at)
        if first.vanished:
            last = _last_line(first.said)
            return (
                f"{first} was killed, and all others with it{f' ({last})' if last else ''}; unless somebody "
                "did "
                "that, the machine may be out of memory: use a smaller --capacity or a narrower --dtype"
            )
        message = self.told(first.number)
        shared = len([rank for rank in failed if self.told(rank.number) == message]) > 1
        return message if first.number == 0 or shared else f"{first}: {message}"

    def _check_left_behind(self, limits: Limits) -> None:
        done = [rank for rank in self.all if rank.code == 0]
        left = [rank for rank in self.all[1:] if rank.there]
        if done and left and time.monotonic() - min(rank.over_at for rank in done) >= limits.waiting:
            raise RanksError(
                f"{left[0]} did not end within the timeout of {limits.timeout:g} s after {done[0]}; it was "
                "killed"
            )

    def _check_begun(self) -> None:
        """Check that all ranks have started, after the launcher has ended and no further rank can report."""
        self._look(_POLL)
        missing = [rank for rank in self.all if rank.pid is None]
        if missing:
            raise RanksError(f"{missing[0]} did not start: {_last_line(self._says) or 'the launcher ended'}")

    # Input.

    def _look(self, seconds: float) -> None:
        """Process the input that arrives within ``seconds``."""
        for key, _ in self._waiting.select(seconds):
            key.data()

    def _gone(self, ranks: Sequence[_Rank], until: float) -> None:
        while any(rank.there for rank in ranks) and time.monotonic() < until:
            self._look(_POLL)
        self._look(0)

    def _join(self) -> None:
        """Accept a rank's report: send its output streams, and record its process."""
        link, _ = self._listener.accept()
        link.settimeout(1.0)
        reads, writes = os.pipe()
        pipe = open(reads, "rb", buffering=0)  # noqa: SIM115
        try:
            number, pid = map(int, link.recv(64).split())
            rank = self.all[number]
            with open(os.devnull, "wb") as nowhere:
                socket.send_fds(link, [b"\n"], [nowhere.fileno() if number else 1, writes])
        except (OSError, ValueError, IndexError):  # it has already ended, or is not a rank
            link.close()
            pipe.close()
            return
        finally:
            os.close(writes)
        rank.pid = pid
        self._hear(pipe, rank.said)
        self._open(link, lambda: self._end_of(rank, link))

    def _end_of(self, rank: _Rank, link: socket.socket) -> None:
        if rank.code is None:
            rank.over_at = time.monotonic()
        with contextlib.suppress(OSError, ValueError):
            if code := link.recv(16):
                rank.code = int(code)
                return  # the connection closes when the process ends
        rank.ended = True
        self._close(link)

    def _hear(self, pipe: IO[bytes] | None, said: bytearray) -> None:
        assert pipe is not None

        def read() -> None:
            if part := os.read(pipe.fileno(), 1 << 12):
                said.extend(part)
                del said[:-_KEPT]
            else:
                self._close(pipe)

        self._open(pipe, read)

    def _open(self, source: IO[bytes] | socket.socket, read: Callable[[], None]) -> None:
        self._waiting.register(source, selectors.EVENT_READ, read)
        self._sources.add(source)

    def _close(self, source: IO[bytes] | socket.socket) -> None:
        self._waiting.unregister(source)
        self._sources.discard(source)
        source.close()


def _last_line(said: bytearray) -> str:
    lines = [line for line in said.decode("utf-8", "replace").splitlines() if line.strip("\x1b ")]
    lines = [line for line in lines if not line.startswith("\x1b")] or lines  # launchers' own are coloured
    own = [line for line in lines if line.startswith(_PREFIX)] or lines
    return own[-1].removeprefix(_PREFIX).strip() if own else ""
