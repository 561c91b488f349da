"""A real Valkey or Redis server on loopback for the duration of a test; no files or processes remain.

::

    with ValkeyServer() as server:
        store = open_store(server.url)
        server.kill()                       # SIGKILL; its data is gone
        server.start()                      # the same port
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

__all__ = ["PATIENCE", "ValkeyServer", "free_port", "wait_until"]

T = TypeVar("T")
PATIENCE = 20.0
"""The time limit for an answer, in seconds."""


class ValkeyServer:
    """A server with command-line ``options``; ``tls``: the options that make it accept only TLS.

    Raises RuntimeError if there is no program (check ``available`` first), or if it does not start.
    """

    def __init__(self, *options: str, tls: Sequence[str] = ()) -> None:
        self.port = 0
        self._options, self._tls = options, tuple(tls)
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="valkey-", ignore_cleanup_errors=True)

    @staticmethod
    def program() -> str | None:
        """The path of valkey-server or redis-server, if one is installed."""
        return shutil.which("valkey-server") or shutil.which("redis-server")

    @property
    def url(self) -> str:
        return f"{'valkeys' if self._tls else 'valkey'}://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def start(self) -> None:
        """Start the server, on its previous port if any, and wait until it answers."""
        program = self.program()
        if program is None:
            raise RuntimeError("neither valkey-server nor redis-server is installed")
        assert self._process is None, "the server is running"
        for attempt in range(5):
            port = self.port or free_port()
            if self._started(program, port):
                self.port = port
                return
            time.sleep(0.02 * attempt)  # another process may have taken the port
        raise RuntimeError(f"{program} {' '.join(self._options)} does not start: {self._log()}")

    def kill(self) -> None:
        """SIGKILL."""
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """Stop answering, with connections kept open."""
        assert self._process is not None, "the server is not running"
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None, "the server is not running"
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        if self._process is not None:
            self.kill()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _started(self, program: str, port: int) -> bool:
        listen = ["--port", "0", "--tls-port", str(port), *self._tls] if self._tls else ["--port", str(port)]
        fixed = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", self._folder.name]
        log = open(f"{self._folder.name}/log", "wb")  # noqa: SIM115
        with log:
            process = subprocess.Popen(
                [program, *listen, *fixed, *self._options], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        weakref.finalize(self, _end_process, process)
        self._process = process
        if _answers(process, port, bool(self._tls)):
            return True
        self._end(signal.SIGKILL)
        return False

    def _end(self, number: int) -> None:
        assert self._process is not None, "the server is not running"
        process, self._process = self._process, None
        process.send_signal(number)
        process.wait(PATIENCE)

    def _log(self) -> str:
        with open(f"{self._folder.name}/log", encoding="utf-8", errors="replace") as log:
            return log.read()[-500:].strip()


def _answers(process: subprocess.Popen[bytes], port: int, tls: bool) -> bool:
    """Whether the server answers; False if it has ended, for example because its port was taken."""

    def asked() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0) as probe:
            if tls:
                return True
            probe.sendall(b"PING\r\n")
            reply = probe.recv(64)
            return bool(reply) and not reply.startswith(b"-LOADING")
        return False

    with contextlib.suppress(TimeoutError):
        wait_until(lambda: process.poll() is not None or asked(), pause=0.002)
    return process.poll() is None


def wait_until(what: Callable[[], T], pause: float = 0.02) -> T:
    """The first true result. Raises TimeoutError after PATIENCE seconds without one."""
    end = time.monotonic() + PATIENCE
    while not (answer := what()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what} stayed false for {PATIENCE} s")
        time.sleep(pause)
    return answer


def _end_process(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
