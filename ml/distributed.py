"""Where the ranks of a group find each other: the environment that launchers set.

torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; mlx.launch sets
MLX_RANK, and MLX_HOSTFILE with the name of a file that lists every rank's addresses. ``local_ranks`` sets
both, for ranks on this machine, so that a rank of any backend finds what its framework reads.

Sources: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables and
https://ml-explore.github.io/mlx/build/html/usage/distributed.html.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from ml.errors import GroupError, ShapeError

__all__ = ["free_ports", "launched", "local_ranks", "ring_hosts"]

LOOPBACK = "127.0.0.1"
_PORTS = range(20_000, 32_000)
"""Below those that systems give to outgoing connections, which could take one before a rank does."""


def launched(environ: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """(rank, size) as a launcher has told this process; None where none has started it.

    Raises GroupError for values that are no rank and size.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _rank("RANK", environ["RANK"], "WORLD_SIZE", environ["WORLD_SIZE"])
    if environ.get("MLX_HOSTFILE") and "MLX_RANK" in environ:
        return _rank("MLX_RANK", environ["MLX_RANK"], "hosts", str(len(ring_hosts(environ))))
    return None


def ring_hosts(environ: Mapping[str, str] = os.environ) -> list[list[str]]:
    """Every rank's addresses, "host:port", from the file that MLX_HOSTFILE names. GroupError without it."""
    path = environ.get("MLX_HOSTFILE", "")
    try:
        hosts = json.loads(Path(path).read_text(encoding="utf-8"))
        found = [[node] if isinstance(node, str) else [str(address) for address in node] for node in hosts]
    except (OSError, ValueError, TypeError) as error:
        raise GroupError(
            f"distributed: MLX_HOSTFILE={path!r} lists no hosts ({error}); start the ranks with mlx.launch"
        ) from error
    return found


@contextlib.contextmanager
def local_ranks(size: int) -> Iterator[tuple[dict[str, str], ...]]:
    """The variables of each of ``size`` ranks on this machine, to be added to their environments.

    The ranks talk over the loopback interface alone, on ports that are free now. The file that
    MLX_HOSTFILE names is there inside of the ``with`` block.
    """
    if size < 1:
        raise ShapeError(f"local_ranks: size={size}; a group has at least one rank")
    master, *ports = free_ports(size + 1)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        hosts = Path(folder) / "hosts.json"
        hosts.write_text(json.dumps([[f"{LOOPBACK}:{port}"] for port in ports]), encoding="utf-8")
        common = {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(master),
            "MLX_HOSTFILE": str(hosts),
            **_gloo_interface(),
        }
        yield tuple(
            {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "MLX_RANK": str(rank)}
            for rank in range(size)
        )


def free_ports(count: int) -> list[int]:
    """So many ports of the loopback interface that nobody listens on now. GroupError where there are none."""
    found: list[int] = []
    for port in random.sample(_PORTS, k=len(_PORTS)):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
            try:
                trial.bind((LOOPBACK, port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise GroupError(f"local_ranks: {count} free ports in [{_PORTS.start}, {_PORTS.stop}); {len(found)} are")


def _gloo_interface() -> dict[str, str]:
    """gloo takes the interface of the machine's name, unless it is told another."""
    names = {name for _, name in socket.if_nameindex()} if hasattr(socket, "if_nameindex") else set()
    return next(({"GLOO_SOCKET_IFNAME": name} for name in ("lo", "lo0") if name in names), {})


def _rank(first: str, rank: str, second: str, size: str) -> tuple[int, int]:
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise GroupError(
            f"distributed: {first}={rank!r} of {second}={size!r}; a rank is in [0, size): start the ranks "
            "with a launcher, or take these out of the environment"
        )
    return int(rank), int(size)
