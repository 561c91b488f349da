"""A launcher, as torchrun and mlx.launch are, that starts in no time."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ml.distributed import free_ports

LOOPBACK = "127.0.0.1"
IMPORTS = {"torch": ("backends.torch.backend", "backends.torch.distributed"), "mlx": ("kvcache_engine",)}
"""What takes ranks most of the time before they begin. Of MLX itself that is nothing: each imports it."""


@contextmanager
def local_ranks(size: int) -> Iterator[tuple[dict[str, str], ...]]:
    """The variables that both launchers would set for each of ``size`` ranks on this machine."""
    master, *ports = free_ports(size + 1)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        hosts = Path(folder) / "hosts.json"
        hosts.write_text(json.dumps([[f"{LOOPBACK}:{port}"] for port in ports]), encoding="utf-8")
        common = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MLX_HOSTFILE": str(hosts)}
        common |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(master)}
        yield tuple(
            {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "MLX_RANK": str(rank)}
            for rank in range(size)
        )


def launcher(size: int, *imports: str) -> list[str]:
    """Of a Python program. With ``imports`` they and the program are imported once, and ranks are forks.

    The program then begins at its ``main()``, or is what follows ``-c``. A framework must not have computed
    anything by then: its threads are not there in a fork.
    """
    return [sys.executable, "-P", __file__, str(size), ",".join(imports)]


def main() -> None:
    size, imports, *command = sys.argv[1:]
    with local_ranks(int(size)) as variables:
        if not imports:
            ranks = [subprocess.Popen(command, env={**os.environ, **own}) for own in variables]
            for rank in ranks:
                rank.wait()
            return
        for name in imports.split(","):
            with contextlib.suppress(ImportError):  # of what is optional, or fails in the ranks as well
                importlib.import_module(name)
        body = body_of(command)
        pids = [forked(body, own) for own in variables]
        for pid in pids:
            os.waitpid(pid, 0)


def body_of(command: list[str]) -> Callable[[], object]:
    if "-c" in command:
        source = compile(command[-1], "rank", "exec")
        return lambda: exec(source, {"__name__": "__main__"})
    program: Callable[[], object] = runpy.run_path(command[-1], run_name="rank")["main"]
    return program


def forked(body: Callable[[], object], variables: Mapping[str, str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.environ.update(variables)
        body()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
