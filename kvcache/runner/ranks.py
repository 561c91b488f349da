"""Starting the ranks of a group on this machine, watching them, and ending all when one fails.

torchrun and mlx.launch start ranks too, and ranks that they start are as good. Here all backends get the
same, and something more: a rank that is stopped (and will not end by itself) is noticed, nothing outlives
whoever started it, all is over within one limit, and what went wrong is told in one line.

A rank reads its job, a line, from standard input, which stays open for as long as its starter lives.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import ml
from kvcache.runner.errors import RunnerError
from kvcache.runner.rank_limits import Limits
from kvcache.runner.rank_process import RankProcess
from ml.distributed import local_ranks

__all__ = ["LATE", "LOST", "RanksError", "exit_code", "job_of_rank", "run_ranks", "watch"]

LOST = 75
"""What a rank exits with that failed because another did (EX_TEMPFAIL)."""
LATE = 76
"""What a rank exits with that has waited for another for as long as its limit let it."""

_GRACE = 4.0
"""Seconds that ranks have to be gone after Ctrl-C."""
Clock = Callable[[], float]


class RanksError(RunnerError):
    """A rank failed, ended or stopped; all others were ended. ``told``: what each wrote to standard error."""

    told: tuple[str, ...] = ()


def run_ranks(
    command: Sequence[str], size: int, job: bytes, timeout: float, environ: Mapping[str, str] = os.environ
) -> None:
    """Run ``command`` as ``size`` ranks of this machine until all are done; rank 0 writes to our stdout.

    ``job``: a line that each reads with :func:`job_of_rank`. ``timeout``: seconds from the moment in which
    a rank is stopped (SIGSTOP) or ends in failure to the moment in which this raises, with all of them
    killed. So that this holds for one that runs and does not come, too, the ranks have to give their group
    ``Limits(timeout).waiting`` and, where that raises GroupError, exit at once with its :func:`exit_code`:
    then another one is looked for as the cause. After one has ended well, the others have so long to end;
    only rank 0, whose output somebody may be reading slowly, has any time.

    Raises RanksError, and KeyboardInterrupt on Ctrl-C: no rank is left then. RunnerError for a timeout
    that is no number of seconds > 0.
    """
    if not hasattr(os, "WUNTRACED"):
        raise ml.NotSupportedError("starting ranks needs a POSIX system; start them with torchrun")
    limits = Limits(timeout)
    with local_ranks(size) as variables:
        ranks = [RankProcess(i, size) for i in range(size)]
        try:
            for rank, own in zip(ranks, variables, strict=True):
                rank.start(command, {**environ, **_shared(environ, size), **own}, job)
            watch(ranks, limits)
        except KeyboardInterrupt:
            _end(ranks, _GRACE, ask=True)
            raise KeyboardInterrupt(ranks[0].told) from None
        except SystemExit:  # told to end: rank 0 shows what it has
            _end(ranks, _GRACE, ask=True)
            raise
        except RanksError as error:
            _end(ranks, limits.ending, ask=sys.stdout.isatty())
            error.told = tuple(rank.said for rank in ranks)
            raise
        finally:
            _end(ranks, limits.ending)
            for rank in ranks:
                rank.release()
            if (ranks[0].code or 0) < 0 and sys.stdout.isatty():
                sys.stdout.write("\x1b[?25h\n")  # it may have hidden the cursor
                sys.stdout.flush()


def exit_code(error: ml.GroupError) -> int:
    """What a rank exits with after it."""
    return LATE if error.late else LOST


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


def watch(
    ranks: Sequence[RankProcess],
    limits: Limits,
    clock: Clock = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when all have ended well; RanksError as soon as one has not, or has been stopped for too long.

    Time for which this process was stopped itself (Ctrl-Z stops all of them) does not count.
    """
    counted, last = 0.0, clock()
    while not all(rank.code == 0 for rank in ranks):
        sleep(limits.poll)
        now = clock()
        counted, last = counted + min(now - last, limits.waiting / 4), now
        for rank in ranks:
            rank.look(counted)
        if any(rank.code for rank in ranks):
            _settle(ranks, limits, counted, clock, sleep)
            raise RanksError(_cause(ranks, limits))
        _check_stopped(ranks, limits, counted)
        _check_left_behind(ranks, limits, counted)


def _check_stopped(ranks: Sequence[RankProcess], limits: Limits, now: float) -> None:
    if any(rank.stopped_since is not None and now - rank.stopped_since >= limits.waiting for rank in ranks):
        raise RanksError(_cause(ranks, limits))


def _check_left_behind(ranks: Sequence[RankProcess], limits: Limits, now: float) -> None:
    done = [rank for rank in ranks if rank.code == 0]
    left = [rank for rank in ranks[1:] if rank.code is None]
    if done and left and now - min(rank.ended for rank in done) >= limits.waiting:
        raise RanksError(
            f"{left[0]} has not ended although {done[0]} is done, for as long as the timeout of "
            f"{limits.timeout:g} s lets it; it was ended"
        )


def _settle(
    ranks: Sequence[RankProcess], limits: Limits, counted: float, clock: Clock, sleep: Callable[[float], None]
) -> None:
    """Let the cause come to light, and what came of it a moment later; all that has ended has been heard."""
    late = any(rank.code == LATE for rank in ranks)
    began = clock()
    until = began + limits.settling(late)
    while not _known(ranks) and clock() < until and any(rank.code is None for rank in ranks):
        sleep(limits.poll)
        for rank in ranks:
            rank.look(counted + clock() - began)
    for rank in ranks:
        rank.hear(limits.hearing / len(ranks))


def _known(ranks: Sequence[RankProcess]) -> bool:
    return any(rank.stopped or rank.code not in (None, 0, LOST, LATE) for rank in ranks)


def _cause(ranks: Sequence[RankProcess], limits: Limits) -> str:
    """What all came from: a signal, a rank that is stopped, or what a rank said itself."""
    failed = [rank for rank in ranks if rank.code]
    for rank in failed:
        if rank.code is not None and rank.code < 0:
            return (
                f"{rank} was ended by {_signal_name(-rank.code)}, and all others with it; where nobody did "
                "that, the machine may be out of memory: take a smaller --capacity or a narrower --dtype"
            )
    own = [rank for rank in failed if rank.code not in (LOST, LATE)]
    stopped = [rank for rank in ranks if rank.stopped]
    if stopped and not own:
        return (
            f"{stopped[0]} is stopped and was waited for as long as the timeout of {limits.timeout:g} s lets "
            "it; all ranks were ended, run it again"
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


def _end(ranks: Sequence[RankProcess], seconds: float, ask: bool = False) -> None:
    """End all that are there, in ``seconds``; one that the system itself holds goes when it lets it.

    ``ask``: rank 0 by SIGTERM at first, which leaves the terminal as it was, and half of the time to obey.
    """
    until = time.monotonic() + seconds
    ask = ask and ranks[0].there and not ranks[0].stopped
    if ask:  # while the others live, or it might speak of their end rather than of its own
        ranks[0].signal(signal.SIGTERM)
        _gone(ranks[:1], until - seconds * 3 / 4)
    for rank in ranks[1:]:
        rank.signal(signal.SIGKILL)
    if ask:  # what it waited for of the others lets it go now
        _gone(ranks[:1], until - seconds / 2)
    ranks[0].signal(signal.SIGKILL)
    _gone(ranks, until)
    for rank in ranks:
        rank.hear(max(0.0, until - time.monotonic()))


def _gone(ranks: Sequence[RankProcess], until: float) -> None:
    while any(rank.there for rank in ranks) and time.monotonic() < until:
        time.sleep(0.002)
        for rank in ranks:
            rank.look()
