"""Forked children that report through a pipe, and how they ended."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable

__all__ = ["child", "ended", "finished", "killed", "output"]


def child(work: Callable[[int], object]) -> tuple[int, int]:
    """Fork; (process, what it writes to). It ends with 0, or with 1 after a traceback."""
    source, sink = os.pipe()
    pid = os.fork()
    if pid:
        os.close(sink)
        return pid, source
    try:
        os.close(source)
        work(sink)
        sys.stdout.flush()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def output(source: int) -> list[str]:
    """The whole lines that a child wrote, to its end."""
    with os.fdopen(source, "rb") as pipe:
        return pipe.read().decode("ascii").rpartition("\n")[0].split()


def finished(pid: int, source: int) -> list[str]:
    lines = output(source)
    status = ended(pid)
    assert status == 0, f"a child ended with {status}"
    return lines


def ended(pid: int) -> int:
    """The signal that ended it, or minus its exit status."""
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status)


def killed(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    assert ended(pid) == signal.SIGKILL
