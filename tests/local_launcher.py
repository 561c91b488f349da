"""A launcher, as torchrun and mlx.launch are, that starts in no time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ml.distributed import free_ports

LOOPBACK = "127.0.0.1"


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


def launcher(size: int) -> list[str]:
    return [sys.executable, "-P", __file__, str(size)]


def main() -> None:
    with local_ranks(int(sys.argv[1])) as variables:
        ranks = [subprocess.Popen(sys.argv[2:], env={**os.environ, **own}) for own in variables]
        for rank in ranks:
            rank.wait()


if __name__ == "__main__":
    main()
