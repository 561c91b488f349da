"""Connections to the server: pooled, limited in number and time, their errors a store's."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import valkey.connection
from valkey.exceptions import ConnectionError as LostError
from valkey.exceptions import OutOfMemoryError, ResponseError, ValkeyError

from kvcache.stores.errors import StoreError, StoreFull, StoreUnavailable
from kvcache.stores.valkey.replies import Replies, Target
from kvcache.stores.valkey.settings import Settings

__all__ = ["Command", "Link", "Wire"]

Command = tuple[str | bytes | int, ...]


class _Reading:
    """Mixed into the client's connections: replies are read by :class:`Replies`, which is kept at hand."""

    replies: Replies

    def set_parser(self, parser_class: type) -> None:
        def make(socket_read_size: int) -> Replies:
            self.replies = Replies(socket_read_size)
            return self.replies

        super().set_parser(make)  # type: ignore[misc]


class _Connection(_Reading, valkey.connection.Connection):
    pass


class _TlsConnection(_Reading, valkey.connection.SSLConnection):
    pass


class Wire:
    """One borrowed connection. Every command that is sent has to have its reply read."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def send(self, *commands: Command) -> None:
        self._connection.send_packed_command(self._connection.pack_commands(commands))

    def stream(self, pieces: Iterable[bytes | memoryview]) -> None:
        """Send a command that is packed already, piece by piece, each asked for when the last has left."""
        self._connection.send_packed_command(pieces)

    def reply(self, target: Target | None = None) -> Any:
        """The next reply, or the server's error, returned; with a target, the length of the value."""
        self._connection.replies.target = target
        try:
            return self._connection.read_response()
        except ResponseError as error:
            return error

    def ask(self, *commands: Command) -> list[Any]:
        """Send, and read all replies; then raise the first error among them."""
        if not commands:
            return []
        self.send(*commands)
        return unless_error([self.reply() for _ in commands])

    def transaction(self, *commands: Command) -> list[Any]:
        """All of the commands at one moment, in one round trip."""
        self.send(("MULTI",), *commands, ("EXEC",))
        results = unless_error([self.reply() for _ in range(len(commands) + 2)])[-1]
        return unless_error(list(results))


def unless_error(replies: list[Any]) -> list[Any]:
    """The replies; or else the first error among them is raised."""
    for reply in replies:
        if isinstance(reply, ResponseError):
            raise reply
    return replies


class Link:
    """The pool. A connection that has failed is closed, and opened again when it is next needed."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._free = threading.BoundedSemaphore(settings.connections)
        self._patience = max(1, round(settings.timeout))
        options: dict[str, Any] = {
            "host": settings.host,
            "port": settings.port,
            "db": settings.db,
            "username": settings.username,
            "password": settings.password,
            "socket_connect_timeout": settings.connect_timeout,
            "socket_timeout": settings.timeout,
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
        make_pool: Any = valkey.connection.BlockingConnectionPool
        self._pool: Any = make_pool(
            max_connections=settings.connections,
            timeout=self._patience,
            connection_class=_TlsConnection if settings.tls else _Connection,
            **options,
        )

    @contextlib.contextmanager
    def wire(self, op: str) -> Iterator[Wire]:
        """A connection for as long as the block lasts, which leaves no reply unread unless it raises."""
        try:
            if not self._free.acquire(timeout=self._patience):
                raise LostError("all connections are in use")
            with self._borrowed(op) as wire:
                yield wire
        except (ValkeyError, OSError) as error:
            raise self._translated(op, error) from error

    @contextlib.contextmanager
    def more(self, op: str, most: int) -> Iterator[list[Wire]]:
        """Up to ``most`` further connections within a block of ``wire``: those that are free at once."""
        with contextlib.ExitStack() as stack:
            wires: list[Wire] = []
            while len(wires) < most and self._free.acquire(blocking=False):
                try:
                    wires.append(stack.enter_context(self._borrowed(op)))
                except (ValkeyError, OSError):  # the server takes no more of them
                    break
            yield wires

    @contextlib.contextmanager
    def _borrowed(self, op: str) -> Iterator[Wire]:
        """One that was acquired."""
        try:
            connection: Any = self._pool.get_connection(op)
            try:
                yield Wire(connection)
            except BaseException:
                connection.disconnect()
                raise
            finally:
                self._pool.release(connection)
        finally:
            self._free.release()

    def close(self) -> None:
        self._pool.disconnect()

    def _translated(self, op: str, error: Exception) -> StoreError:
        """A server's message may quote what it was sent, a password too: that is struck out."""
        text = str(error) or type(error).__name__
        password = self._settings.password
        if password and password in text:
            text = text.replace(password, "***")
            error.args = (text,)
        if isinstance(error, OutOfMemoryError):
            return StoreFull(f"{op}: {self._settings.url}: {text}")
        return StoreUnavailable(f"{op}: {self._settings.url}: {text}")
