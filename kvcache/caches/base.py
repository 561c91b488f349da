"""What caches with tensors of their own have in common: a backend, a configuration, the order of calls."""

from __future__ import annotations

from threading import get_ident
from typing import Any, Generic, TypeVar

import ml
from kvcache.attention.batch import check_sequence
from kvcache.cache import (
    CacheDType,
    ClosedError,
    InvalidRangeError,
    NotSupportedError,
    OrderError,
    check_thread,
    check_whole,
)
from kvcache.caches.managed import PreparedCalls, S
from kvcache.caches.one_thread import PassOfThread
from kvcache.snapshots.snapshot import check_kind
from kvcache.storage.formats import CacheFormat

P = TypeVar("P", bound=PassOfThread)


class BoundCache(PreparedCalls[S], Generic[P, S]):
    """A cache bound to a backend between ``init`` and ``close``, with a configuration and a current layer.

    Refuses calls that come before ``init``, after ``close``, or outside a pass; ``P`` is the pass.
    """

    _max_sequences: int
    _dtype: CacheFormat

    def __init__(self) -> None:
        super().__init__()
        # Of the instance from the start, not of the class: Python reads those faster.
        self._backend: ml.Backend | None = None
        self._config: ml.CacheConfig | None = None
        self._closed = False
        self._layer = 0
        self._pass: P | None = None

    def __repr__(self) -> str:
        name = type(self).__name__
        if self._backend is None:
            return f"<{name}, closed>" if self._closed else f"<{name}, not bound to a backend: call init>"
        facts = [f"{self._dtype} on {self._backend.name}", f"sequences: {self._max_sequences}"]
        return f"<{name}: {', '.join([*facts, *self._told()])}>"

    def _told(self) -> list[str]:
        return []

    def _bound(self, op: str) -> ml.Backend:
        """The backend; OrderError before ``init``, ClosedError after ``close``."""
        if self._backend is None:
            if self._closed:
                raise ClosedError(f"{op}: the cache is closed; call init to use it again")
            raise OrderError(f"{op}: the cache has not been initialized; call init first")
        return self._backend

    def _check_sequence(self, op: str, seq: int) -> None:
        """Refuse a sequence that is none, and a cache that is not bound."""
        self._bound(op)
        check_sequence(op, seq, self._max_sequences)

    def _started(self, op: str) -> P:
        """The pass under way; OrderError where there is none, or it is another thread's."""
        self._bound(op)
        if self._pass is None:
            raise OrderError(f"{op}: there is no current pass; call start_forward first")
        check_thread(op, self._pass.thread)
        return self._pass

    def take_over(self) -> None:
        """Let this thread go on with the pass under way, which another began: see PreparedCalls."""
        if self._pass is not None:
            self._pass.thread = get_ident()

    def _check_copy(self, src_seq: int, dst_seq: int, length: int) -> None:
        """Refuse sequences that are none or the same, and a length that means nothing."""
        for seq in (src_seq, dst_seq):
            self._check_sequence("copy_prefix", seq)
        check_whole("copy_prefix", "length", length)
        if src_seq == dst_seq:
            raise InvalidRangeError(
                f"copy_prefix: sequence {src_seq} to itself; use remove(seq, length) to shorten a sequence"
            )

    def _check_remove(self, seq: int, begin: int, end: int | None) -> None:
        """Refuse a sequence that is none, and a range that means nothing."""
        self._check_sequence("remove", seq)
        check_whole("remove", "begin", begin)
        check_whole("remove", "end", begin if end is None else end)
        if end is not None and end < begin:
            raise InvalidRangeError(f"remove: [{begin}, {end}); the range must satisfy 0 <= begin <= end")

    def _check_restore(self, seq: int, snapshot: Any, kind: type) -> None:
        """Refuse a sequence that is none, and a snapshot of another kind of cache, or on another backend."""
        self._check_sequence("restore", seq)
        check_kind("restore", self, kind, [snapshot])
        owner = snapshot.backend
        if owner is not None and owner is not self._backend:
            raise InvalidRangeError(
                f"restore: the snapshot lies on {owner!r}, which is not the open backend of this cache, "
                f"{self._backend!r}; pass it through kvcache.serialize and kvcache.deserialize"
            )

    @property
    def backend(self) -> ml.Backend:
        return self._bound("backend")

    @property
    def max_sequences(self) -> int:
        self._bound("max_sequences")
        return self._max_sequences

    def _check_init(self, backend: object, dtype: CacheDType, **sizes: int) -> CacheFormat:
        """What K and V are stored in; refuses to bind twice, what is no backend, a dtype that they cannot
        have, and sizes below 1.
        """
        if self._backend is not None:
            raise OrderError("init: the cache is already initialized; close it first")
        if not hasattr(backend, "new_context"):
            raise InvalidRangeError(
                f"init: backend={backend!r:.60}; it must be an open backend, as ml.open_backend gives one"
            )
        stored = CacheFormat.of(dtype)
        for name, value in sizes.items():
            check_whole("init", name, value, least=1)
        return stored

    @staticmethod
    def _check_stored(backend: ml.Backend, stored: CacheFormat) -> None:
        """Refuse what the backend says that it has no dtypes for; one that does not say refuses it in put."""
        features = getattr(backend, "features", None)
        lacking = stored.dtypes - features.dtypes if isinstance(features, ml.Features) else ()
        if lacking:
            names = " and ".join(sorted(dtype.name for dtype in lacking))
            raise NotSupportedError(
                f"init: dtype={stored.name} is stored in {names}, which backend {backend.name!r} does not "
                "have; F32 can be stored on every backend"
            )

    @property
    def config(self) -> ml.CacheConfig:
        """What holds: the one set, else the backend's own, else the defaults."""
        if self._config is not None:
            return self._config
        backend = self._bound("config")
        if isinstance(backend, ml.SupportsCacheConfig):
            return backend.cache_config()
        return ml.CacheConfig()

    def set_layer(self, layer: int) -> None:
        """The layer that the next ``put``, ``get`` and ``attend`` are about; layers count from 0."""
        current = self._pass
        if current is not None and current.thread != get_ident():
            check_thread("set_layer", current.thread)
        if type(layer) is not int or layer < 0:
            check_whole("set_layer", "layer", layer)
        self._layer = layer

    def settings(self) -> dict[str, object]:
        """What decides the content of a snapshot, JSON-able: two caches that agree in it may share them."""
        self._bound("settings")
        return {"kind": type(self).__name__, "dtype": self._dtype.name}
