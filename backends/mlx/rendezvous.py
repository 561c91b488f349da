"""Waiting for the other ranks of a ring before MLX is asked to join them.

MLX joins in one call, which waits for the previous rank without a limit, tries the next rank for 15 seconds,
and blocks all Python threads. So the ranks meet here first, on the same addresses: each listens on its own
and connects to the next one, and two messages go around the ring. The first confirms that all ranks are
present; the second that the addresses are free again for MLX.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence

from ml.errors import GroupError

JOINING = 5.0
"""The least seconds for MLX after all ranks have met. A rank that is too early takes a second."""

_STEP = 0.05
"""Seconds between two tries to reach the next rank."""
_LEAD = 0.05
"""Seconds before the last rank, which connects first, so that the others listen; otherwise it waits for 1
s.
"""
_ALL_HERE, _FREE = b"h", b"f"


def rendezvous(hosts: Sequence[Sequence[str]], rank: int, seconds: float) -> None:
    """Return when all ranks, whose addresses "host:port" ``hosts`` lists, have called this.

    Raises GroupError after ``seconds``, or as soon as a connected rank disconnects; the message names the
    rank.
    """
    began = time.monotonic()
    with contextlib.ExitStack() as opened:
        ring = _Ring(hosts, rank, seconds, began + seconds, opened)
        ring.join()
        ring.pass_on(_ALL_HERE)
        ring.listener.close()
        ring.pass_on(_FREE)
    if rank == len(hosts) - 1:
        time.sleep(_LEAD)


class _Ring:
    """The connections of one rank: ``left`` receives from the previous rank, ``right`` sends to the next."""

    def __init__(
        self,
        hosts: Sequence[Sequence[str]],
        rank: int,
        seconds: float,
        until: float,
        opened: contextlib.ExitStack,
    ) -> None:
        self.rank, self.size = rank, len(hosts)
        self._seconds, self._until, self._opened = seconds, until, opened
        self._hosts = [host[0] for host in hosts]
        self._next, self._before = (rank + 1) % self.size, (rank - 1) % self.size
        self.listener = self._listen()

    def join(self) -> None:
        """Connect to both neighbours."""
        self.left: socket.socket | None = None
        self.right: socket.socket | None = None
        while self.left is None or self.right is None:
            if time.monotonic() >= self._until:
                lacking = self._next if self.right is None else self._before
                raise self._error(f"rank {lacking} ({self._hosts[lacking]}) did not connect", late=True)
            self.right = self.right or self._connect()
            self.left = self.left or self._accept()

    def pass_on(self, message: bytes) -> None:
        """Pass a message once around, from rank 0 to rank 0; the message that addresses are free ends at the
        last rank.
        """
        if self.rank:
            self._hear(message)
        if self.rank < self.size - 1 or message == _ALL_HERE:
            assert self.right is not None
            with contextlib.suppress(OSError):  # the next rank has gone, which those waiting for it notice
                self.right.sendall(message)
        if self.rank == 0 and message == _ALL_HERE:
            self._hear(message)

    def _listen(self) -> socket.socket:
        host, port = _address(self._hosts[self.rank])
        listener = self._opened.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen()
        except OSError as error:
            raise self._error(f"its address {self._hosts[self.rank]} cannot be used: {error}") from error
        return listener

    def _connect(self) -> socket.socket | None:
        try:
            connection = socket.create_connection(
                _address(self._hosts[self._next]), timeout=self._left_of(1.0)
            )
        except OSError:
            return None
        self._opened.enter_context(connection)
        with contextlib.suppress(OSError):
            connection.sendall(self._hello(self.rank))
        return connection

    def _accept(self) -> socket.socket | None:
        """The previous rank's connection, if it has connected; other connections are ignored."""
        self.listener.settimeout(_STEP)
        try:
            connection, _ = self.listener.accept()
        except OSError:
            return None
        self._opened.enter_context(connection)
        expected = self._hello(self._before)
        try:
            return (
                connection if self._read(connection, len(expected), self._left_of(1.0)) == expected else None
            )
        except OSError:
            return None

    def _hear(self, message: bytes) -> None:
        assert self.left is not None
        try:
            heard = self._read(self.left, 1, self._left_of(self._seconds))
        except TimeoutError:
            reason = f"rank {self._before} is connected and waits for another rank"
            raise self._error(reason, late=True) from None
        except OSError as error:
            raise self._error(f"rank {self._before} has gone: {error}") from error
        if heard != message:
            raise self._error(f"rank {self._before} has gone")

    @staticmethod
    def _read(connection: socket.socket, size: int, seconds: float) -> bytes:
        until, received = time.monotonic() + seconds, b""
        while len(received) < size:
            connection.settimeout(max(0.001, until - time.monotonic()))
            part = connection.recv(size - len(received))
            if not part:
                break
            received += part
        return received

    def _hello(self, rank: int) -> bytes:
        """The greeting, which identifies a rank of this ring."""
        return hashlib.blake2b(json.dumps([rank, self._hosts]).encode(), digest_size=16).digest()

    def _left_of(self, most: float) -> float:
        return max(0.001, min(most, self._until - time.monotonic()))

    def _error(self, reason: str, late: bool = False) -> GroupError:
        error = GroupError(
            f"distributed: rank {self.rank} of {self.size} could not join the ring within "
            f"{self._seconds:.3g} s ({reason}); start all ranks together with mlx.launch, or raise timeout="
        )
        error.late = late
        return error


@contextlib.contextmanager
def interrupted(until: float) -> Iterator[None]:
    """Interrupt a system call still waiting at ``until`` with SIGALRM; only in the main thread. For waits
    that no thread can watch: a rank that is stopped between two short calls.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    timer = signal.setitimer(signal.ITIMER_REAL, max(0.001, until - time.monotonic()), _STEP)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) >= 1 << 16:
        raise GroupError(f"distributed: {text!r} in MLX_HOSTFILE is not an address host:port")
    return host, int(port)
