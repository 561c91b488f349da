"""An entry's bytes on their way: read to where they belong, and digested as they come."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from kvcache.stores.buffers import WritableBuffer, as_writable
from kvcache.stores.digests import Digest
from kvcache.stores.errors import SnapshotCorruptError, StoreValueError
from kvcache.stores.manifest import Manifest
from kvcache.stores.streams import read_parts_digested

__all__ = ["FileReader", "writable_bytes"]


class FileReader:
    """See :class:`kvcache.stores.protocol.Reader`.

    ``digest`` is one that has seen no data yet; ``guard(op)`` makes the system's errors a store's; ``hit()``
    is called for the last byte.
    """

    __slots__ = ("_digest", "_fd", "_guard", "_hit", "_manifest", "left")

    def __init__(
        self,
        fd: int,
        manifest: Manifest,
        digest: Digest,
        guard: Callable[[str], AbstractContextManager[None]],
        hit: Callable[[], None],
    ) -> None:
        self.left = manifest.nbytes
        self._fd, self._manifest, self._digest, self._guard, self._hit = fd, manifest, digest, guard, hit

    def __del__(self) -> None:
        self.close()

    def fill(self, buffers: Sequence[WritableBuffer]) -> None:
        views, wanted = writable_bytes(buffers, self.left)
        with self._guard("fill"):
            whole = read_parts_digested(self._fd, views, self._digest)
        self.left -= wanted
        if not whole:
            nbytes, key = self._manifest.nbytes, self._manifest.key
            raise SnapshotCorruptError(f"fill: {nbytes} bytes of {key} were put, and fewer are there")
        if not self.left:
            self._check()
            self._hit()

    def close(self) -> None:
        fd, self._fd, self.left = getattr(self, "_fd", -1), -1, 0
        if fd >= 0:
            os.close(fd)

    def _check(self) -> None:
        digest, manifest = self._digest.hexdigest(), self._manifest
        if digest != manifest.digest:
            raise SnapshotCorruptError(
                f"fill: the digest of {manifest.key} is {digest}, and was {manifest.digest}"
            )


def writable_bytes(buffers: Sequence[WritableBuffer], left: int) -> tuple[list[memoryview], int]:
    """The buffers as flat views, and how many bytes they are: StoreValueError for more than ``left``."""
    views = [as_writable(buffer, "fill") for buffer in buffers]
    wanted = sum(map(len, views))
    if wanted > left:
        raise StoreValueError(f"fill: {wanted} bytes; {left} are left")
    return views, wanted
