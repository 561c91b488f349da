"""The class that SGLang loads: ``HiCacheStorage`` (sglang/srt/mem_cache/hicache_storage.py) over our
stores.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from kvcache.cache import InvalidRangeError, NotSupportedError
from kvcache.integrations.open_stores import StoresInUse
from kvcache.integrations.sglang.host_pages import FlatPages, HostPages, as_bytes, page_size, pages_of
from kvcache.integrations.sglang.identity import identity_of_server, share_of
from kvcache.integrations.sglang.options import StorageOptions
from kvcache.integrations.sglang.page_store import PageKind, PageStore

try:
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorage,
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
        PoolHitPolicy,
        PoolName,
        PoolTransfer,
        PoolTransferResult,
    )
except ImportError as error:
    raise ImportError(
        "kvcache.integrations.sglang: SGLang's hierarchical cache was not found; it needs 'sglang>=0.5.23' "
        f"({error})"
    ) from error

__all__ = ["HiCacheStore"]

log = logging.getLogger("kvcache")


class HiCacheStore(HiCacheStorage):  # type: ignore[misc]
    """A tier of stores below SGLang's host memory.

    SGLang calls it from its own threads, to look up, read and write pages. Reading a missing or damaged page
    fails, and SGLang computes it. An unreachable store is not used for a while.

    Raises InvalidRangeError for an unknown option, StoreError if a store does not open, and UnknownModelError
    if the loaded weights cannot be identified.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:
        self.storage_config = storage_config
        self.registered_pools: dict[Any, Any] = {}
        self.mem_pool_host: Any = None
        self._options = StorageOptions.parse(storage_config.extra_config or {})
        self._identity = self._options.identity or identity_of_server(*_server())
        self._stored_as = _kv_cache_dtypes()
        self._pages: dict[str, tuple[Any, HostPages, PageKind]] = {}
        self._stores = StoresInUse(self._options.store, 0)
        self._store = PageStore(self._stores.tier)
        self._threads = ThreadPoolExecutor(self._options.threads, thread_name_prefix="kvcache-hicache")
        self._lock = threading.Lock()
        self._stats: dict[str, list[float]] = {name: [] for name in _STATS}
        log.info("HiCacheStore: pages go to %s", ", ".join(self._options.store))

    # SGLang's calls to look up, read and write pages of its registered pools.

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """The number of leading pages of K and V that are stored."""
        if self._is_logical():
            return len(keys)
        return self._store.leading(self._kind(PoolName.KV), keys)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """The longest prefix that every pool can restore, and all shorter ones."""
        pages = self.batch_exists(keys)
        hits = {PoolName.KV: pages} if pages else {}
        restorable = list(range(1, pages + 1))
        for transfer in pool_transfers or []:
            if not restorable:
                break
            able = self._restorable(transfer, keys[:pages])
            if able:
                hits[transfer.name] = max(able)
            restorable = [length for length in restorable if length in able]
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Read pages of K and V into their slots; returns which of them succeeded."""
        return self._move(PoolName.KV, keys, host_indices, self._read, "prefetch")

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages of K and V from their slots; returns which of them are stored."""
        return self._move(PoolName.KV, keys, host_indices, self._write, "backup")

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """As ``batch_get_v1``, for several pools."""
        return self._move_all(transfers, self._read)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """As ``batch_set_v1``, for several pools."""
        return self._move_all(transfers, self._write)

    def _move_all(self, transfers: list[PoolTransfer], move: Callable[..., bool]) -> dict[str, list[bool]]:
        return {one.name: self._move(one.name, one.keys or [], one.host_indices, move) for one in transfers}

    # Flat pages, which SGLang itself copies from and to the pool, without interface_v1.

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """The flat page ``target_location``, filled; None if it is not stored."""
        filled = self._store.read(self._flat_kind(target_location), key, [as_bytes(target_location)])
        return target_location if filled else None

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        return [self.get(key, target) for key, target in zip(keys, target_locations, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a flat page; False if no store accepted it."""
        return self._store.write(self._flat_kind(value), key, [as_bytes(value)])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return all(self.set(key, value) for key, value in zip(keys, values, strict=True))

    # The rest.

    def clear(self) -> None:
        """Make all pages stored so far unfindable; stores drop them when they need room. Other processes and
        ranks still find theirs.
        """
        self._store.rename()

    def get_stats(self) -> Any:
        """SGLang's ``StorageMetrics`` of pages moved since the last call; None if metrics are disabled."""
        if not self.storage_config.enable_storage_metrics:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            stats, self._stats = self._stats, {name: [] for name in _STATS}
        return StorageMetrics(**stats)

    def close(self) -> None:
        """Release the stores. A second call has no effect."""
        self._threads.shutdown()
        self._stores.close()

    def _is_logical(self) -> bool:
        """Whether K and V have no memory of their own, so that other pools hold everything."""
        return getattr(self.mem_pool_host, "kv_buffer", self) is None

    def _pool(self, name: Any) -> Any:
        pool = self.registered_pools.get(name)
        if pool is None and name == PoolName.KV:
            pool = self.mem_pool_host
        if pool is None:
            raise NotSupportedError(f"HiCacheStore: the pool {name!r} was not registered")
        return pool

    def _of_pool(self, name: Any) -> tuple[HostPages, PageKind]:
        """The accessor and the kind of a pool's pages."""
        pool = self._pool(name)
        known = self._pages.get(str(name))
        if known is None or known[0] is not pool:
            flat = name == PoolName.KV and not self._options.interface_v1
            pages = FlatPages(pool) if flat else pages_of(pool)
            known = self._pages[str(name)] = (
                pool,
                pages,
                PageKind(self._settings(name, pool, pages), pages.sizes),
            )
        return known[1:]

    def _kind(self, name: Any) -> PageKind:
        return self._of_pool(name)[1]

    def _flat_kind(self, page: torch.Tensor) -> PageKind:
        """The kind of the flat pages of K and V."""
        pages = FlatPages(self._pool(PoolName.KV))
        nbytes = page.numel() * page.element_size()
        if (nbytes,) != pages.sizes:
            raise InvalidRangeError(
                f"HiCacheStore: a flat page of {nbytes} bytes; the pool's have {pages.sizes[0]}"
            )
        return PageKind(self._settings(PoolName.KV, self._pool(PoolName.KV), pages), pages.sizes)

    def _settings(self, name: Any, pool: Any, pages: HostPages) -> dict[str, Any]:
        config, dtype = self.storage_config, getattr(pool, "dtype", None)
        settings = {
            "model": dict(self._identity),
            "share": share_of(config, config.is_mla_model and name != PoolName.MAMBA),
            "pool": [str(name), type(pool).__name__, getattr(pool, "storage_format_tag", None)],
            "layout": [getattr(pool, "layout", None), pages.form, *pages.sizes],
            "dtype": str(dtype),
            "tokens": page_size(pool),
        }
        if dtype is None or not dtype.is_floating_point:  # a pool stores both kinds of FP8 as bytes
            settings["kv_cache_dtype"] = self._stored_as
        if config.pp_size > 1:
            cut = os.environ.get("SGLANG_PP_LAYER_PARTITION")
            settings["layers"] = [getattr(pool, f"{end}_layer", cut) for end in ("start", "end")]
        return settings

    def _restorable(self, transfer: PoolTransfer, keys: Sequence[str]) -> frozenset[int]:
        """The prefix lengths in pages, up to all of ``keys``, that a pool can restore."""
        kind = self._kind(transfer.name)
        if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
            return frozenset(range(1, self._store.leading(kind, keys) + 1))
        if transfer.hit_policy != PoolHitPolicy.TRAILING_PAGES:
            raise NotSupportedError(
                f"HiCacheStore: the hit policy {transfer.hit_policy} of {transfer.name} is not supported; "
                "all pages and trailing pages are"
            )
        there = self._store.stored(kind, keys)
        last = max(1, len(transfer.keys or ()))
        lengths = range(1, len(keys) + 1)
        return frozenset(length for length in lengths if all(there[max(0, length - last) : length]))

    def _move(
        self, name: Any, keys: Sequence[str], indices: Any, move: Callable[..., bool], what: str = ""
    ) -> list[bool]:
        """Move pages in several threads; none is started after a failure, since only a leading run is
        useful.
        """
        if not keys or (name == PoolName.KV and self._is_logical()):
            return [True] * len(keys)
        if indices is None:
            log.error("HiCacheStore: %s: no slots for %d pages", name, len(keys))
            return [False] * len(keys)
        begun = time.perf_counter()
        pages, kind = self._of_pool(name)
        places = pages.split(indices, len(keys))
        failed = threading.Event()

        def one(key: str, place: Any) -> bool:
            well = False
            try:
                well = not failed.is_set() and move(pages, kind, key, place)
            except Exception:
                log.exception("HiCacheStore: a page of %d bytes was not moved", kind.nbytes)
            if not well:
                failed.set()
            return well

        moved = list(self._threads.map(one, keys, places))
        if what and any(moved):
            with self._lock:
                self._stats[f"{what}_pgs"].append(sum(moved))
                gigabytes = sum(moved) * kind.nbytes / 1e9
                self._stats[f"{what}_bandwidth"].append(gigabytes / (time.perf_counter() - begun))
        return moved

    def _read(self, pages: HostPages, kind: PageKind, key: str, place: Any) -> bool:
        parts = pages.target(place)
        if not self._store.read(kind, key, parts):
            return False
        pages.filled(place, parts)
        return True

    def _write(self, pages: HostPages, kind: PageKind, key: str, place: Any) -> bool:
        return self._store.write(kind, key, pages.source(place))


_STATS = ("prefetch_pgs", "backup_pgs", "prefetch_bandwidth", "backup_bandwidth")


def _server() -> tuple[Any, Sequence[Any]]:
    """The server's arguments, and its initial adapters; None if no server runs in this process."""
    from sglang.srt.runtime_context import get_lora, get_server_args

    try:
        args, lora = get_server_args(), get_lora()
    except ValueError:
        return None, ()
    return args, (lora.lora_paths or ()) if lora.enable_lora else ()


def _kv_cache_dtypes() -> list[str | None]:
    """The server's dtypes of K and V, for the model and a draft model; empty if no server runs here."""
    from sglang.srt.runtime_context import get_model, get_spec

    try:
        return [get_model().kv_cache_dtype, get_spec().speculative_draft_kv_cache_dtype]
    except ValueError:
        return []
