"""Connections to the server: pooled, limited in number and time, their errors a store's."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import valkey.connection
from valkey.exceptions import ConnectionError as LostError
from valkey.exceptions import OutOfMemoryError, ResponseError, ValkeyError
from valkey.exceptions import TimeoutError as LateError

from kvcache.stores.errors import StoreError, StoreFullError, StoreUnavailableError
from kvcache.stores.valkey.options import ValkeyOptions
from kvcache.stores.valkey.replies import SHARE, Deadline, Replies, Shape, array, status

__all__ = ["Command", "Link", "Wire", "unless_error"]


class Command(NamedTuple):
    """What is sent, and the kind of its reply."""

    words: Sequence[object]
    """Text, bytes and numbers."""
    reply: Shape


class _Bounded:
    """Mixed into the client's connections: their time limits are those of the call that they serve."""

    replies: Replies
    _sock: Any

    @property
    def open_socket(self) -> Any:
        """The socket that is connected; None: there is none."""
        return self._sock

    def set_parser(self, parser_class: type) -> None:
        def make(socket_read_size: int) -> Replies:
            self.replies = Replies(socket_read_size)
            return self.replies

        super().set_parser(make)  # type: ignore[misc]

    @property
    def socket_timeout(self) -> float | None:
        deadline = self.replies.deadline
        return None if deadline is None else deadline.left()

    @socket_timeout.setter
    def socket_timeout(self, seconds: float | None) -> None:
        """Nothing: the client's own limit is for each step, and none for a call."""

    @property
    def socket_connect_timeout(self) -> float:
        return min(self._connect_timeout, self.socket_timeout or self._connect_timeout)

    @socket_connect_timeout.setter
    def socket_connect_timeout(self, seconds: float) -> None:
        self._connect_timeout = seconds

    def ready(self, deadline: Deadline) -> None:
        """Connect, where it is not connected to a server that is there and has said nothing unasked."""
        client: Any = self
        self.replies.deadline = deadline
        with contextlib.suppress(LostError):
            if self._sock is not None and not client.can_read():
                return
        client.disconnect()
        client.connect()

    def pace(self) -> None:
        """Give what is sent next as long as the call has left."""
        if self._sock is not None:
            self._sock.settimeout(self.socket_timeout)


class _Connection(_Bounded, valkey.connection.Connection):  # type: ignore[misc]
    pass


class _TlsConnection(_Bounded, valkey.connection.SSLConnection):  # type: ignore[misc]
    pass


class Wire:
    """One borrowed connection. The reply to every command that is sent must be read."""

    def __init__(self, connection: Any, deadline: Deadline) -> None:
        self._connection = connection
        self.deadline = deadline

    def send(self, *commands: Command) -> None:
        self.stream(self._connection.pack_commands([command.words for command in commands]))

    def stream(self, pieces: Iterable[bytes | memoryview]) -> None:
        """Send commands that are packed already, piece by piece, each asked for when the last has left."""
        self._connection.send_packed_command(self._paced(pieces))

    def reply(self, shape: Shape) -> Any:
        """The next reply, or the server's error, returned."""
        return self._connection.replies.read(shape)

    def answers(self, *commands: Command) -> list[Any]:
        """Send, and read all replies, the server's errors among them."""
        if commands:
            self.send(*commands)
        return [self.reply(command.reply) for command in commands]

    def ask(self, *commands: Command) -> list[Any]:
        """The same, and then raise the first error among them."""
        return unless_error(self.answers(*commands))

    def transaction(self, *commands: Command) -> list[Any]:
        """All of the commands at one moment, in one round trip."""
        self.send(Command(["MULTI"], status), *commands, Command(["EXEC"], status))
        queued = [self.reply(status) for _ in range(len(commands) + 1)]
        results: list[Any] = unless_error(
            [*queued, self.reply(array(*(command.reply for command in commands)))]
        )[-1]
        return results

    def _paced(self, pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for piece in pieces:
            self._connection.pace()
            yield piece


def unless_error(replies: list[Any]) -> list[Any]:
    """The replies; or else the first error among them, and in lists among them, is raised."""
    for reply in replies:
        if isinstance(reply, ResponseError):
            raise reply
        if isinstance(reply, list):
            unless_error(reply)
    return replies


class Link:
    """The pool. A connection that has failed is closed; others are used again, in a forked child not."""

    def __init__(self, settings: ValkeyOptions) -> None:
        self._settings = settings
        self._permits = threading.BoundedSemaphore(settings.connections)
        self._idle: list[_Bounded] = []
        self._process = os.getpid()

    @contextlib.contextmanager
    def wire(self, op: str, nbytes: int = 0) -> Iterator[Wire]:
        """A connection for as long as the block lasts, which leaves no reply unread unless it raises.

        The call has its deadline, which it says more of in case it moves more than ``nbytes``.
        """
        deadline = Deadline(self._settings.timeout, nbytes)
        try:
            if not self._permits.acquire(timeout=deadline.left()):
                raise LostError("all connections are in use")
            with self._borrowed(deadline) as wire:
                yield wire
        except (ValkeyError, OSError) as error:
            raise self._translated(op, error) from error

    @contextlib.contextmanager
    def more(self, most: int, deadline: Deadline) -> Iterator[list[Wire]]:
        """Up to ``most`` further connections within a block of ``wire``: those that are free at once."""
        with contextlib.ExitStack() as stack:
            wires: list[Wire] = []
            while len(wires) < most and self._permits.acquire(blocking=False):
                try:
                    wires.append(stack.enter_context(self._borrowed(deadline)))
                except (ValkeyError, OSError):  # the server takes no more of them
                    break
            yield wires

    @contextlib.contextmanager
    def _borrowed(self, deadline: Deadline) -> Iterator[Wire]:
        """One, for which a permit was acquired."""
        connection: Any = None
        try:
            connection = self._taken()
            connection.ready(deadline)
            yield Wire(connection, deadline)
        except BaseException:
            if connection is not None:
                connection.disconnect()
            raise
        else:
            self._idle.append(connection)
        finally:
            self._permits.release()

    def _taken(self) -> _Bounded:
        if os.getpid() != self._process:
            self.close()
            self._process = os.getpid()
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        return self._made()

    def _made(self) -> _Bounded:
        settings = self._settings
        options: dict[str, Any] = {
            "host": settings.host,
            "port": settings.port,
            "db": settings.db,
            "username": settings.username,
            "password": settings.password,
            "socket_connect_timeout": settings.connect_timeout,
            "socket_keepalive": True,
            "lib_name": None,
            "lib_version": None,
        }
        if settings.tls:
            options |= {
                "ssl_ca_certs": settings.tls_ca,
                "ssl_certfile": settings.tls_cert,
                "ssl_keyfile": settings.tls_key,
                "ssl_cert_reqs": "required" if settings.tls_verify else "none",
                "ssl_check_hostname": settings.tls_verify,
            }
        kind: Any = _TlsConnection if settings.tls else _Connection
        made: _Bounded = kind(**options)
        return made

    def close(self) -> None:
        while self._idle:
            connection: Any = self._idle.pop()
            connection.disconnect()

    def _translated(self, op: str, error: Exception) -> StoreError:
        """A server's message may quote what it was sent, a password too: that is struck out."""
        text = str(error) or type(error).__name__
        password = self._settings.password
        if password and password in text:
            text = text.replace(password, "***")
            error.args = (text,)
        if isinstance(error, LateError | TimeoutError):
            limit = self._settings.timeout
            text += (
                f"; timeout={limit:g}: a call has {limit:g} s, and again for each {SHARE >> 20} MiB it moves"
            )
        if isinstance(error, OutOfMemoryError):
            return StoreFullError(f"{op}: {self._settings.url}: {text}")
        return StoreUnavailableError(f"{op}: {self._settings.url}: {text}")
