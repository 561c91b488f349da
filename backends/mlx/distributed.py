"""Ranks joined by mx.distributed: a ring of TCP connections, or another transport of mlx.launch. MLX waits
for other ranks without a time limit, inside an evaluation. So waits for the stream are announced
(``MlxGroup.waiting``), and a thread closes the ring's connections when one takes too long: MLX then fails the
evaluation in the waiting thread, as when a rank has ended.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from backends.mlx.errors import MLX_ERRORS
from backends.mlx.rendezvous import JOINING, interrupted, rendezvous
from backends.mlx.tensor import MlxTensor
from backends.mlx.work import MlxWork
from ml.base import BaseBackend, BaseGroup, SoloGroup
from ml.distributed import check_timeout, ring_hosts
from ml.dtypes import DType
from ml.errors import GroupError

_NARROW = (DType.F16, DType.BF16)
_SETTLING = 0.2
"""Seconds for the others to begin their wait: MLX may never end an exchange begun after the connections are
closed.
"""
_TICKS = 20
"""The number of times that a limit is checked before it expires."""


def join(backend: BaseBackend, work: MlxWork, timeout: float) -> BaseGroup:
    """The group of ranks started by mlx.launch, or with its variables; without them, this process alone."""
    seconds = check_timeout(timeout)
    rank = os.environ.get("MLX_RANK", "")
    if not rank:
        return SoloGroup(backend, seconds)
    ring = bool(os.environ.get("MLX_HOSTFILE"))
    hosts = ring_hosts() if ring else []
    if len(hosts) == 1:  # too few for a ring
        return SoloGroup(backend, seconds)
    until = time.monotonic() + seconds
    if ring:
        rendezvous(hosts, _number(rank, len(hosts)), seconds)
    try:
        with interrupted(max(until, time.monotonic() + JOINING)):
            native = mx.distributed.init(strict=True, backend="ring" if ring else "any")
    except MLX_ERRORS as error:
        failure = GroupError(
            f"distributed: MLX could not join rank {rank} to the others ({error}); start all ranks together "
            "with mlx.launch"
        )
        failure.late = time.monotonic() >= until
        raise failure from error
    connections = _connections(hosts, native.rank()) if ring and native.size() > 1 else []
    return MlxGroup(backend, work, native, seconds, connections)


def _number(rank: str, size: int) -> int:
    if not rank.isdecimal() or int(rank) >= size:
        raise GroupError(f"distributed: MLX_RANK={rank!r} of {size} hosts; a rank is in [0, hosts)")
    return int(rank)


class MlxGroup(BaseGroup):
    """Operations are submitted to the stream when they are called, so that all ranks run them in the same
    order.
    """

    def __init__(
        self,
        backend: BaseBackend,
        work: MlxWork,
        native: Any,
        timeout: float,
        connections: list[socket.socket],
    ) -> None:
        super().__init__(backend, native.rank(), native.size(), timeout)
        self._native = native
        on_cpu = backend.devices[0].kind == "cpu"
        self._stream = work.stream if on_cpu else _cpu_stream()  # MLX communicates in host memory
        self._last: Any = None
        self._watch = _Watch(timeout, connections)

    def _all_reduce(self, ctx: Any, tensor: MlxTensor) -> MlxTensor:
        array = tensor.read()
        if tensor.dtype in _NARROW:
            array = mx.astype(array, mx.float32, stream=tensor.storage.work.stream)
        total = mx.distributed.all_sum(array, group=self._native, stream=self._stream)
        return self._scheduled("all_reduce", tensor.result(total))

    def _all_gather(self, ctx: Any, tensor: MlxTensor, axis: int) -> MlxTensor:
        stream = tensor.storage.work.stream
        mine = mx.expand_dims(tensor.read(), 0, stream=stream)
        parts = mx.distributed.all_gather(mine, group=self._native, stream=self._stream)
        shape = [size * self.size if k == axis else size for k, size in enumerate(tensor.shape)]
        whole = mx.reshape(mx.moveaxis(parts, 0, axis, stream=stream), shape, stream=stream)
        return self._scheduled("all_gather", tensor.wrap(whole))

    def _barrier(self) -> None:
        token = mx.zeros((1,), stream=self._stream)
        with self.waiting("barrier"):
            mx.eval(mx.distributed.all_sum(token, group=self._native, stream=self._stream))

    def _scheduled(self, op: str, result: MlxTensor) -> MlxTensor:
        """Submit an exchange after waiting for the previous one, so that each wait covers only one."""
        array = result.read()
        result.storage.work.flush(array)
        before, self._last = self._last, array
        if before is not None:
            with self.waiting(op):
                mx.eval(before)
        return result

    @contextlib.contextmanager
    def waiting(self, op: str) -> Iterator[None]:
        """A context for waits for the stream, which raises GroupError after the limit."""
        if self.failed:
            self._check_open(op)
        with self._watch:
            try:
                yield
            except MLX_ERRORS as error:
                if self._watch.expired or "[ring]" in str(error):
                    raise self.broken(op, error, self._watch.expired) from error
                raise

    def finish(self, stream: Any) -> bool:
        """Whether all work of the stream is done, after waiting at most the limit. It does not wait if a rank
        is lost: MLX fails one exchange when a connection closes, and may wait forever for the next.
        """
        if self.failed:
            return False
        waiting = threading.Thread(target=_synchronize, args=(stream,), name="mlx-group-finish", daemon=True)
        waiting.start()
        waiting.join(self.timeout)
        return not waiting.is_alive()

    def _abandon(self) -> None:
        time.sleep(_SETTLING)
        self._watch.cut()

    def _close(self) -> None:
        self._last = None
        self._watch.close()


class _Watch:
    """Closes connections when a thread has been inside ``with watch`` for longer than ``limit`` seconds. Time
    is counted in ticks of its own thread, so that time while the whole process is stopped does not count.
    """

    def __init__(self, limit: float, connections: list[socket.socket]) -> None:
        self.expired = False
        self._connections = connections
        self._tick = min(limit / _TICKS, 1.0)
        self._limit = limit - self._tick
        self._clock = 0.0
        self._inside: dict[int, float] = {}
        self._depth = threading.local()
        self._closed = threading.Event()
        if connections:
            threading.Thread(target=self._run, name="mlx-group-watch", daemon=True).start()

    def __enter__(self) -> None:
        depth = self._depth.value = getattr(self._depth, "value", 0) + 1
        if depth == 1:
            self._inside[threading.get_ident()] = self._clock

    def __exit__(self, *error: object) -> None:
        self._depth.value -= 1
        if not self._depth.value:
            self._inside.pop(threading.get_ident(), None)

    def cut(self) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closed.set()
        for connection in self._connections:
            connection.close()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(self._tick):
            now = time.monotonic()
            self._clock += min(now - last, max(2 * self._tick, self._limit / 4))
            last = now
            began = min(tuple(self._inside.values()), default=self._clock)
            if self._clock - began >= self._limit:
                self.expired = True
                self.cut()
                return


def _connections(hosts: list[list[str]], rank: int) -> list[socket.socket]:
    """The ring's connections to the previous and next rank, identified by the ports in the hostfile."""
    local, remote = (_ports(hosts[index % len(hosts)]) for index in (rank, rank + 1))
    connections: list[socket.socket] = []
    for name in os.listdir("/dev/fd"):  # noqa: PTH208
        try:
            connection = socket.socket(fileno=os.dup(int(name)))
        except (OSError, ValueError):
            continue
        try:
            ours = connection.getsockname()[1] in local or connection.getpeername()[1] in remote
        except (OSError, IndexError, TypeError):
            ours = False
        if ours:
            connections.append(connection)
        else:
            connection.close()
    return connections


def _ports(addresses: list[str]) -> set[int]:
    return {int(address.rpartition(":")[2]) for address in addresses}


def _synchronize(stream: Any) -> None:
    with contextlib.suppress(*MLX_ERRORS):
        mx.synchronize(stream)


def _cpu_stream() -> Any:
    make = getattr(mx, "new_thread_unsafe_stream", mx.new_stream)
    return make(mx.Device(mx.cpu, 0))
