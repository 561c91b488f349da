"""``--ml-time-limit``: a test that hangs fails by name, and the run continues if possible.

Importing this imports no framework and no part of the suite.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from typing import Any, TypeVar

import pytest

__all__ = ["MOST", "SECONDS", "TimeLimit", "TimeLimitError"]

SECONDS = 600.0
"""The default; even tests that compile for every shape take less."""
MOST = 1e6
"""The largest limit that the timers of every system accept."""

T = TypeVar("T")
Hook = Generator[None, T, T]


class TimeLimitError(BaseException):
    """A test took too long. Not an Exception, since tables of cases and the code under test catch those."""


class TimeLimit:
    """A pytest plugin that limits setup, call and teardown of a test to ``seconds`` each.

    Python code is interrupted, and the test fails. A framework that hangs cannot be interrupted: shortly
    afterwards all stacks are printed and the process exits with code 1.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._stderr = os.dup(sys.__stderr__.fileno()) if sys.__stderr__ is not None else None

    def pytest_unconfigure(self) -> None:
        if self._stderr is not None:
            os.close(self._stderr)
            self._stderr = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Hook[Any]:
        with self._limited(item):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Hook[Any]:
        with self._limited(item):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Hook[Any]:
        with self._limited(item):
            return (yield)

    def pytest_enter_pdb(self) -> None:
        """No limit in the debugger."""
        faulthandler.cancel_dump_traceback_later()
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)

    @contextlib.contextmanager
    def _limited(self, item: pytest.Item) -> Iterator[None]:
        def interrupt(*_: object) -> None:
            raise TimeLimitError(f"{item.name} did not end within {self.seconds:g} s (--ml-time-limit)")

        with contextlib.ExitStack() as stack:
            if self._stderr is not None:
                late = self.seconds + max(1.0, self.seconds / 20)
                faulthandler.dump_traceback_later(late, exit=True, file=self._stderr)
                stack.callback(faulthandler.cancel_dump_traceback_later)
            if hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread():
                stack.callback(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, interrupt))
                stack.callback(signal.setitimer, signal.ITIMER_REAL, 0)
                signal.setitimer(signal.ITIMER_REAL, self.seconds)
            yield
