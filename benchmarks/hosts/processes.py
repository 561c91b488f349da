"""The processes of the benchmark: hosts, and the server of the store that they share."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Self

from benchmarks.hosts.network import Namespace
from tests.rigs.servers import ValkeyServer

ROOT = Path(__file__).resolve().parents[2]
PORT = 6379
"""Of a server inside a namespace."""
PATIENCE = 120.0
"""Seconds for an answer, or for a host to be ready."""


class Process:
    """A host in a process of its own, inside a namespace if one is given. A context manager."""

    def __init__(self, *options: str, inside: Namespace | None = None, threads: int = 1) -> None:
        line = [sys.executable, "-m", "benchmarks.hosts.host", *options]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            line if inside is None else inside.command(*line),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        self._errors: list[str] = []
        self._reader = threading.Thread(target=self._drain, daemon=True)
        self._reader.start()

    def ready(self) -> Self:
        self._answer()
        return self

    def ask(self, **asked: Any) -> dict[str, Any]:
        """See ``Host.ask``. Raises RuntimeError with what the host says went wrong."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self._answer()

    @property
    def log(self) -> str:
        """What the host has written to its standard error."""
        return "".join(self._errors)

    def close(self) -> int:
        """End the host; its exit code."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended already
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        if self._process.poll() is None:
            self._process.kill()
        code = self._process.wait()
        self._reader.join(5)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        return code

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        watch = threading.Timer(PATIENCE, self._process.kill)
        watch.daemon = True  # a signal may come before `try` is reached; nothing then waits for it to end
        watch.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watch.cancel()
        if not line:
            self._process.wait(10)
            self._reader.join(5)
            said = self.log.strip()[-2000:] or "it said nothing"
            told = said.removeprefix("host: ") if "\n" not in said else said
            raise RuntimeError(f"the host ended with {self._process.returncode}: {told}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def _drain(self) -> None:
        errors: IO[str] | None = self._process.stderr
        assert errors is not None
        for line in errors:
            self._errors.append(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def end_in_order() -> None:
    """Let SIGTERM end this program as an exception does: hosts, server and network go with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


@contextlib.contextmanager
def store_server(folder: Path, inside: Namespace | None = None, memory: str = "4gb") -> Iterator[str]:
    """A server that keeps values in memory alone, ended with the block; gives the URL for ``--store``.

    Inside a namespace it listens on its address, which no one outside the network reaches, else on loopback.
    """
    program = ValkeyServer.program()
    if program is None:
        raise RuntimeError(
            "there is neither valkey-server nor redis-server here: apt-get install redis-server"
        )
    settings = ("--maxmemory", memory, "--maxmemory-policy", "allkeys-lru")
    if inside is None:
        with ValkeyServer(*settings) as server:
            yield server.url
        return
    own = ("--bind", inside.address, "--protected-mode", "no", "--save", "", "--dir", str(folder))
    line = inside.command(program, *own, *settings)
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _await_port(process, inside)
            yield f"valkey://{inside.address}:{PORT}/0"
        finally:
            process.kill()


_CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 1).close()"


def _await_port(server: subprocess.Popen[bytes], inside: Namespace) -> None:
    """Return when the port answers, for at most ten seconds."""
    probe = inside.command(sys.executable, "-c", _CONNECT, inside.address, str(PORT))
    for _ in range(100):
        if server.poll() is not None:
            raise RuntimeError(f"the store's server ended with {server.returncode}")
        if not subprocess.run(probe, capture_output=True, check=False).returncode:
            return
        time.sleep(0.05)
    raise RuntimeError(f"the store's server does not answer on {inside.address}:{PORT}")
