"""The package's client behind calls that answer or raise: its codes are understood here, and nowhere else."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from kvcache.stores.errors import StoreError, StoreFullError, StoreUnavailableError

__all__ = ["Client", "Piece"]

Piece = tuple[int, int, int]
"""(address, bytes, offset in the entry)."""

_NO_ROOM: Final = {-200, -101}
_PARAMETERS: Final = -600
_MISSING: Final = {-702, -703, -704, -707, -710, -712}
"""Not there, not finished, or gone while it was read."""
_EXISTS: Final = -705
_TRANSFER: Final = -800
_MASTER: Final = range(-1099, -899)
"""The master did not answer, in time or at all, or is not the one to ask."""
_SLOW: Final = 2.0
"""Seconds; a host that is dead is found so in less, one that is frozen holds up every call."""

_open_puts: set[tuple[int, str]] = set()
_changed: Final = threading.Condition()


class Client:
    """``native``: a MooncakeDistributedStore that was set up; ``config``: a ReplicateConfig for what is put.

    Any thread may call. Where the master does not answer: StoreUnavailableError.
    """

    def __init__(self, native: Any, where: str, config: Any = None) -> None:
        if not hasattr(native, "batch_put_session_start"):
            raise StoreUnavailableError(
                f"MooncakeStore: {type(native).__name__} has no put sessions; it needs "
                "mooncake-transfer-engine 0.3.13 or later"
            )
        self.native = native
        self._where = where
        self._config = () if config is None else (config,)

    # Looking.

    def present(self, names: Sequence[str]) -> list[bool]:
        """One round trip. What is being written is not there."""
        if not names:
            return []
        codes = self.native.batch_is_exist(list(names))
        for code in codes:
            if code < 0:
                raise self._failure("exists", code)
        return [code == 1 for code in codes]

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Bytes of each; None: not there. Two round trips, one where nothing is there."""
        asked = list(dict.fromkeys(names))
        there = [name for name, present in zip(asked, self.present(asked), strict=True) if present]
        replicas = self.native.batch_get_replica_desc(there) if there else {}
        sizes = {name: _size_of(replicas.get(name, ())) for name in there}
        for name in there:
            if sizes[name] is None:  # it went meanwhile, lies on a disk, or the master did not answer
                sizes[name] = self.size(name)  # which tells these apart
        return [sizes.get(name) for name in names]

    def size(self, name: str) -> int | None:
        code = int(self.native.get_size(name))
        if code < 0 and code not in _MISSING:
            raise self._failure("size", code)
        return None if code in _MISSING else code

    # Reading.

    def read(self, name: str, pieces: Sequence[Piece]) -> bool:
        """Fill memory with parts of an entry. False: it is not there, not as long, or its host is gone.

        StoreUnavailableError where its host does not answer.
        """
        addresses, sizes, offsets = map(list, zip(*pieces, strict=True))
        began = time.monotonic()
        answers = self.native.get_into_ranges(
            addresses,
            [[name]] * len(pieces),
            [[[0]]] * len(pieces),
            [[[offset]] for offset in offsets],
            [[[size]] for size in sizes],
        )
        codes = [int(answer[0][0]) for answer in answers]
        return all(self._read(code, size, began) for code, size in zip(codes, sizes, strict=True))

    def _read(self, code: int, size: int, began: float) -> bool:
        if code == size:
            return True
        if code in _MISSING or code == _PARAMETERS:  # parameters: it is shorter by now
            return False
        if code == _TRANSFER and time.monotonic() - began <= _SLOW:
            return False
        raise self._failure("read", code)

    # Writing.

    @contextlib.contextmanager
    def putting(self, name: str, nbytes: int) -> Iterator[bool]:
        """Room for an entry, which exists when the block ends. False: there is one already, or on its way.

        A block that raises leaves nothing. The master lets one writer in, of all hosts.
        """
        with _alone(self.native, name):
            if not self._begin(name, nbytes):
                yield False
                return
            try:
                yield True
                (code,) = self.native.batch_put_session_end([name])
                if code:
                    raise self._failure("put", code)
            except BaseException:
                self.native.batch_put_session_revoke([name])
                raise

    def _begin(self, name: str, nbytes: int) -> bool:
        (code,) = self.native.batch_put_session_start([name], [nbytes], *self._config)
        if code == _PARAMETERS:  # a put that could not be revoked while the master was away
            self.native.batch_put_session_revoke([name])
            (code,) = self.native.batch_put_session_start([name], [nbytes], *self._config)
        if code == _EXISTS:
            return False
        if code in _NO_ROOM:
            raise StoreFullError(f"put: {nbytes} bytes; the hosts of {self._where} have no room for them")
        if code:
            raise self._failure("put", code)
        return True

    def write(self, name: str, pieces: Sequence[Piece]) -> None:
        """Write parts of an entry that is being put."""
        addresses, sizes, offsets = map(list, zip(*pieces, strict=True))
        (code,) = self.native.batch_put_from_multi_buffer_ranges([name], [addresses], [sizes], [offsets])
        if code != sum(sizes):
            raise self._failure("put", code)

    def remove(self, name: str) -> bool:
        """Forget an entry, whoever reads it. One that is being written stays."""
        code = int(self.native.remove(name, True))
        if code and code not in _MISSING:
            raise self._failure("delete", code)
        return not code

    def _failure(self, op: str, code: int) -> StoreError:
        if code in _MASTER:
            return StoreUnavailableError(f"{op}: {self._where} does not answer ({code})")
        if code == _TRANSFER:
            return StoreUnavailableError(f"{op}: a host of {self._where} could not be reached ({code})")
        return StoreUnavailableError(f"{op}: {self._where} refused with code {code}")


@contextlib.contextmanager
def _alone(native: object, name: str) -> Iterator[None]:
    """One put of a name at a time in this process: the package's client knows one session for each name."""
    mine = id(native), name
    with _changed:
        _changed.wait_for(lambda: mine not in _open_puts)
        _open_puts.add(mine)
    try:
        yield
    finally:
        with _changed:
            _open_puts.discard(mine)
            _changed.notify_all()


def _size_of(replicas: Sequence[Any]) -> int | None:
    """Bytes of an entry, from the first of its replicas that says so."""
    for replica in replicas:
        if replica.is_memory_replica():
            return int(replica.get_memory_descriptor().buffer_descriptor.size)
    return None
