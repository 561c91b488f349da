"""How the ranks of a group find each other: through the environment that launchers set.

torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; mlx.launch sets
MLX_RANK, and MLX_HOSTFILE with the name of a file that lists every rank's addresses, or MLX_WORLD_SIZE
between CUDA devices.

Sources: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables and
https://ml-explore.github.io/mlx/build/html/usage/distributed.html.
"""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from ml.errors import GroupError, ShapeError

__all__ = ["check_timeout", "free_ports", "launched", "ring_hosts"]

LOOPBACK = "127.0.0.1"
_PORTS = range(20_000, 32_000)
"""Below the ephemeral ports, so that no outgoing connection takes one before a rank does."""


LONGEST = 7 * 86_400
"""The longest timeout in seconds, which also fits in 32 bits as milliseconds."""


def check_timeout(timeout: Any, op: str = "distributed") -> float:
    """The timeout in seconds; ShapeError unless it is above 0 and at most LONGEST."""
    number: Any = timeout if isinstance(timeout, Real) else 0
    if not 0 < number <= LONGEST:
        raise ShapeError(
            f"{op}: timeout={timeout!r:.40}; it must be a number of seconds above 0, at most {LONGEST}"
        )
    return float(number)


def launched(environ: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """(rank, size) from the launcher's environment; None if no launcher started this process.

    Raises GroupError for invalid values.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _rank("RANK", environ["RANK"], "WORLD_SIZE", environ["WORLD_SIZE"])
    if "MLX_RANK" in environ and "MLX_WORLD_SIZE" in environ:
        return _rank("MLX_RANK", environ["MLX_RANK"], "MLX_WORLD_SIZE", environ["MLX_WORLD_SIZE"])
    if environ.get("MLX_HOSTFILE") and "MLX_RANK" in environ:
        return _rank("MLX_RANK", environ["MLX_RANK"], "hosts", str(len(ring_hosts(environ))))
    return None


def ring_hosts(environ: Mapping[str, str] = os.environ) -> list[list[str]]:
    """Every rank's addresses, "host:port", from the file named by MLX_HOSTFILE. Raises GroupError without
    one.
    """
    path = environ.get("MLX_HOSTFILE", "")
    try:
        hosts = json.loads(Path(path).read_text(encoding="utf-8").strip() or "[[]]")  # empty: one rank
        addresses = [
            [node] if isinstance(node, str) else [str(address) for address in node] for node in hosts
        ]
        if len(addresses) > 1 and not all(addresses):
            raise ValueError("a rank has no address")
    except (OSError, ValueError, TypeError) as error:
        raise GroupError(
            f"distributed: MLX_HOSTFILE={path!r} lists no hosts ({error}); start the ranks with mlx.launch"
        ) from error
    return addresses


def free_ports(count: int) -> list[int]:
    """``count`` consecutive free ports of the loopback interface. Raises GroupError if there are none."""
    for first in random.sample(_PORTS[: len(_PORTS) - count], k=1000):
        ports = list(range(first, first + count))
        if all(map(_free, ports)):
            return ports
    raise GroupError(
        f"free_ports: {count} consecutive free ports are needed in [{_PORTS.start}, {_PORTS.stop}); "
        "none were found"
    )


def _free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        try:
            trial.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def _rank(first: str, rank: str, second: str, size: str) -> tuple[int, int]:
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise GroupError(
            f"distributed: {first}={rank!r} of {second}={size!r}; a rank is in [0, size): start the ranks "
            "with a launcher, or unset both variables"
        )
    return int(rank), int(size)
