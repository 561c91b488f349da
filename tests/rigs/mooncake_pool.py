"""A real Mooncake pool on loopback for the length of a test: a master, and hosts that give memory to it.

::

    with MooncakePool() as pool:
        pool.add_host(64 << 20)
        store = open_store(pool.url)
        pool.kill(pool.master)              # SIGKILL
        pool.start_master()                 # the same port
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Self

from kvcache.stores.errors import StoreUnavailableError
from kvcache.stores.mooncake.connecting import load

from ..needs import wanting
from .servers import PATIENCE, free_port, wait_until

__all__ = ["MooncakePool"]

_HOST = """
import sys
from kvcache.stores import open_store
store = open_store(sys.argv[1], segment=int(sys.argv[2]), timeout=20)
store.stat(["x"])
print("ready", flush=True)
sys.stdin.read()
"""
"""Gives memory to the pool until its input ends."""


class MooncakePool:
    """``options`` are those of the master's command line. RuntimeError where a process does not start."""

    def __init__(self, *options: str) -> None:
        self.port = free_port()
        self._options = options
        self._folder = tempfile.TemporaryDirectory(prefix="mooncake-", ignore_cleanup_errors=True)
        self._processes: list[subprocess.Popen[str]] = []
        self._master: subprocess.Popen[str] | None = None

    @staticmethod
    def missing() -> str | None:
        """Why no pool can run here; None where one can."""
        try:
            load()
        except StoreUnavailableError as error:
            return wanting("libibverbs1 libnuma1 libcurl4") if ".so" in str(error) else str(error)
        return None if _program().is_file() else f"{_program()} is not there"

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self.port}"

    @property
    def master(self) -> subprocess.Popen[str]:
        assert self._master is not None, "the pool was not started"
        return self._master

    def start_master(self) -> None:
        """Start, at the port of the last time, and wait until it listens."""
        command = [
            str(_program()),
            "--rpc_address=127.0.0.1",
            f"--rpc_port={self.port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={free_port()}",
            "--rpc_thread_num=2",
            "--client_ttl=2",
            "--put_start_discard_timeout_sec=1",
            "--logtostderr",
            *self._options,
        ]
        self._master = self._start(command)
        wait_until(self._listens)

    def add_host(self, segment: int) -> subprocess.Popen[str]:
        """A process that gives ``segment`` bytes of its memory."""
        host = self._start([sys.executable, "-c", _HOST, self.url, str(segment)])
        assert host.stdout is not None
        if host.stdout.readline() != "ready\n":
            raise RuntimeError(f"a host did not start: {self._log()}")
        return host

    @staticmethod
    def kill(process: subprocess.Popen[str]) -> None:
        """SIGKILL."""
        process.kill()
        process.wait(PATIENCE)

    def close(self) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGCONT)
            self.kill(process)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        try:
            self.start_master()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        # Not with the limits that a store of this process has set for itself.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MC_")}
        with open(f"{self._folder.name}/log", "a", encoding="utf-8") as log:
            started = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment | {"PYTHONPATH": str(Path(__file__).parents[2])},
            )
        self._processes.append(started)
        return started

    def _listens(self) -> bool:
        if self.master.poll() is not None:
            raise RuntimeError(f"mooncake_master ended: {self._log()}")
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def _log(self) -> str:
        return Path(self._folder.name, "log").read_text(encoding="utf-8", errors="replace")[-1000:].strip()


def _program() -> Path:
    """The master itself, not the script that starts it: signals have to reach it."""
    found = importlib.util.find_spec("mooncake")
    if found is None or not found.submodule_search_locations:
        return Path("mooncake_master")
    return Path(found.submodule_search_locations[0]) / "mooncake_master"
