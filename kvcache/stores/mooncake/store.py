"""A store in the pooled memory of hosts, through Mooncake Store.

An entry is one object, with a header that holds its digest (``kvcache.stores.mooncake.transfer``). A put
opens a session with the master, which lets one writer in; writes through registered memory; and closes it,
which makes the object exist. A get reads header and bytes and checks them. What does not hold is read once
more, so that an eviction on the way is never taken for damage.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from kvcache.stores.buffers import Buffer, WritableBuffer, as_parts, as_writable, check_size
from kvcache.stores.closing import RemoteStore
from kvcache.stores.digests import XXH3, Digests
from kvcache.stores.errors import SnapshotCorruptError, StoreUnavailableError
from kvcache.stores.mooncake.client import Client
from kvcache.stores.mooncake.connecting import connect, knock, replicated
from kvcache.stores.mooncake.options import MooncakeOptions
from kvcache.stores.mooncake.staging import Staging
from kvcache.stores.mooncake.transfer import HEADER, EntryTransfer, FramedDigest
from kvcache.stores.protocol import Stat, check_key

__all__ = ["MooncakeStore"]


class MooncakeStore(RemoteStore):
    """Entries in the pool whose master is at ``url`` (``mooncake://host[:port]``).

    ``options`` are the fields of ``MooncakeOptions``, in their own types or as text. ``client`` is a
    ``mooncake.store.MooncakeDistributedStore`` that was set up already, and stays the caller's to close;
    its settings are then its own.

    The budget is the pool's: the master evicts what was not asked for longest once the hosts' segments are
    nearly full. Any question renews an entry's lease, ``stat`` too. An entry lies in the memory of one host
    and goes with it: that is a miss. Opening contacts nobody; while the master does not answer calls raise
    StoreUnavailableError. After a fork, open the store anew in the child.

    Raises StoreValueError for a URL or an option that makes no sense or does not exist,
    StoreUnavailableError where a package is missing.
    """

    def __init__(self, url: str | None = None, *, client: Any = None, **options: Any) -> None:
        self._settings = settings = MooncakeOptions.of(url, options)
        self._digests = Digests("MooncakeStore", "mooncake", settings.digest, settings.secret)
        super().__init__(self._settings)
        self._client = client
        self._silent = False
        """Whether the last call had no answer: the next one asks first if anybody listens."""
        self._link: tuple[Client, Staging] | None = None
        self._linking = threading.Lock()
        self._counting = threading.Lock()
        self._process = os.getpid()
        self.dropped = 0
        """Entries that were corrupt or foreign, and were removed."""

    def put(self, key: str, parts: Sequence[Buffer]) -> bool:
        """As the protocol says; False also while another host writes this key."""
        check_key(key)
        views, nbytes = as_parts(parts)
        with self._call("put") as (client, staging), client.putting(self._name(key), HEADER + nbytes) as new:
            if new:
                with staging.lent() as room:
                    digest = FramedDigest(self._digests, key, nbytes)
                    EntryTransfer(client, self._name(key), digest, room).send(views)
            return new

    def stat(self, keys: Sequence[str]) -> list[Stat | None]:
        """As the protocol says; when an entry was last used is not known, and asking counts as use."""
        names = [self._name(check_key(key)) for key in keys]
        with self._call("stat") as (client, _):
            sizes = client.sizes(names)
            for name in {name for name, size in zip(names, sizes, strict=True) if size and size < HEADER}:
                self._drop(client, name)
            return [Stat(size - HEADER) if size and size >= HEADER else None for size in sizes]

    def get_into(self, key: str, buffer: WritableBuffer) -> bool:
        name = self._name(check_key(key))
        view = as_writable(buffer, "get_into")
        with self._call("get_into") as (client, staging):
            for _ in range(2):
                size = client.size(name)
                if size is None:
                    return False
                if size < HEADER:
                    continue
                check_size("get_into", view, key, size - HEADER)
                with staging.lent() as room:
                    digest = FramedDigest(self._digests, key, len(view))
                    sound = EntryTransfer(client, name, digest, room).receive(view)
                if sound is not False:
                    return sound is True
            self._drop(client, name)
            raise SnapshotCorruptError(f"get_into: {key} in {self.url}: wrong digest; it was dropped")

    def prefix(self, keys: Sequence[str]) -> int:
        names = [self._name(check_key(key)) for key in keys]
        with self._call("prefix") as (client, _):
            there = client.present(names)
            return there.index(False) if False in there else len(there)

    def delete(self, key: str) -> bool:
        name = self._name(check_key(key))
        with self._call("delete") as (client, _):
            return client.remove(name)

    def close(self) -> None:
        """As the protocol says. What a ``segment`` of this host holds is lost to all."""
        super().close()

    def _let_go(self) -> None:
        if self._link is not None and os.getpid() == self._process:
            client, staging = self._link
            staging.close()
            if self._client is None:
                client.native.close()
            self._link = None

    # One call.

    @contextlib.contextmanager
    def _call(self, op: str) -> Iterator[tuple[Client, Staging]]:
        if os.getpid() != self._process:
            raise StoreUnavailableError(f"{op}: opened before a fork; open it again in the child")
        with self._in_flight.running(op):
            if self._silent and self._client is None and (reason := knock(self._settings)):
                raise StoreUnavailableError(f"{op}: {reason}")
            try:
                yield self._linked()
            except StoreUnavailableError:
                self._silent = True
                raise
            self._silent = False

    def _linked(self) -> tuple[Client, Staging]:
        with self._linking:
            if self._link is None:
                native = self._client if self._client is not None else connect(self._settings)
                client = Client(native, self.url, replicated(self._settings))
                self._link = (
                    client,
                    Staging(
                        native.register_buffer,
                        native.unregister_buffer,
                        self._settings.staging,
                        self._settings.lanes,
                    ),
                )
            return self._link

    def _name(self, key: str) -> str:
        family = "" if self._digests.name == XXH3 else f"{self._digests.family}:"
        return f"{self._settings.prefix}:{family}{key}"

    def _drop(self, client: Client, name: str) -> None:
        client.remove(name)
        with self._counting:
            self.dropped += 1
