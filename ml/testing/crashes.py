"""Names the test in which the process ended: after a signal or ``os._exit``, pytest itself prints nothing.

Importing this imports no framework and no part of the suite.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys

__all__ = ["CrashWatch"]

_WATCH = """
import sys
running = ""
for line in sys.stdin:
    running = line.strip()
if running:
    print(f"\\n{running}: the process ended during this test", file=sys.stderr)
"""


class CrashWatch:
    """A pytest plugin that tells a small process beside pytest which test runs. When the pipe to it closes
    during a test, that process prints the test's name to stderr.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self._process is None:  # not earlier: only now does stderr lead outside for certain
            # In a session of its own, since whatever kills pytest's process group must not kill it.
            command = [sys.executable, "-I", "-S", "-c", _WATCH]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, text=True, start_new_session=True
            )
        self._tell(nodeid)

    def pytest_runtest_logfinish(self) -> None:
        self._tell("")

    def pytest_unconfigure(self) -> None:
        if self._process is not None:
            self._tell("")
            self._process.communicate()
            self._process = None

    def _tell(self, nodeid: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # somebody has ended it
            self._process.stdin.write(f"{nodeid}\n")
            self._process.stdin.flush()
