"""A tier below vLLM's own: a ``SecondaryTierManager`` over our stores. Imports vLLM.

vLLM's OffloadingConnector schedules, and copies chunks of blocks between the device and host memory; what
lies there goes to the stores and comes back. vLLM's thread only submits: threads look up, read and write.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol

from kvcache.integrations.vllm import required  # isort: split

import numpy as np
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvcache import StoreTier
from kvcache.integrations.open_stores import StoresInUse, use_entry
from kvcache.integrations.vllm.chunks import ChunkRows, HashNames, TokenNames, layout_of, raw_rows
from kvcache.integrations.vllm.naming import Pages
from kvcache.integrations.vllm.options import TierOptions
from kvcache.integrations.vllm.transfers import PATIENCE
from kvcache.integrations.vllm.work import Workers
from kvcache.stores import SerializedSnapshot, StoreUnavailableError

__all__ = ["KVCacheTier", "Names"]

log = init_logger("vllm.kvcache_tier")  # vLLM shows only loggers under its own name


class Names(Protocol):
    """The keys of chunks in stores. Called by vLLM's thread only."""

    def of(self, key: bytes, request: str, end: int | None) -> str | None:
        """The key of the chunk that vLLM calls ``key``, of a request's tokens up to ``end``; None: not for
        stores.
        """

    def finished(self, request: str) -> None:
        """No further call names the request."""

    def reset(self) -> None:
        """Names from now on differ from all earlier ones."""


class KVCacheTier(SecondaryTierManager):  # type: ignore[misc]
    """Our stores as a tier of vLLM's, named in ``secondary_tiers`` by ``type`` and ``module_path``.

    On its own it uses vLLM's hashes as names, which do not cover the model: ``identity`` must name it. Under
    ``KVCacheOffloadingConnector``, chunks are named as ``KVCacheConnector`` names pages. A chunk that is
    missing or damaged is a miss; an unreachable store is left alone for a while.

    Raises InvalidRangeError for an unknown or invalid option, and StoreError if a store does not open.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        chosen = TierOptions.parse(options)
        config = offloading_spec.config
        self.locality = Locality(chosen.locality) if chosen.locality is not None else None
        self.layout = layout_of(config, required.VERSION)
        self.tokens = {
            group.group_id: group.tokens_per_block * config.cache.blocks_per_chunk for group in config.groups
        }
        self.identity = chosen.identity
        self.names: Names = HashNames(self.identity, self.layout)
        self.rows: ChunkRows = raw_rows(self.block_size_bytes, self.layout)
        self._events: list[OffloadingEvent] | None = None
        if chosen.enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events:
            self._events = []
        self._stores = StoresInUse(chosen.store, 0)
        self._lookups = _Lookups(tier_type, self._stores.tier)
        self._workers = Workers("kvcache-tier", chosen.threads)
        self._jobs: dict[int, list[tuple[OffloadKey, str | None]]] = {}
        """Submitted and not yet collected: each chunk with its name."""
        self._done: queue.SimpleQueue[tuple[JobResult, bool]] = queue.SimpleQueue()
        self._running = 0
        self._cancelled = False
        self._changed = threading.Condition()
        log.info("KVCacheTier: chunks go to %s", ", ".join(chosen.store))

    def name_by_tokens(self, settings: Mapping[str, Any]) -> TokenNames:
        """From now on, name chunks by requests' tokens: as pages of a cache with ``settings``, or, without
        any, as vLLM's own.
        """
        pages = {
            group: Pages(
                self.identity,
                settings or {"kind": "vLLM chunks", "layout": self.layout, "group": group},
                tokens,
            )
            for group, tokens in self.tokens.items()
        }
        self.names = names = TokenNames(pages)
        return names

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.cleanup(req_context.req_id)
        self.names.finished(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        name = self._name(key, req_context)
        found = False if name is None else self._lookups.lookup(OffloadKey(name.encode()), req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, self._store)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, self._load)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        finished = []
        while not self._done.empty():
            result, promotion = self._done.get()
            chunks = self._jobs.pop(result.job_id)
            moved = set(result.successful_keys or ())
            if promotion:
                lost = [name for key, name in chunks if name is not None and key not in moved]
                self._lookups.mark_miss([OffloadKey(name.encode()) for name in lost])
            elif self._events is not None:
                keys = [key for key, name in chunks if name is not None and key in moved]
                if keys:
                    event = OffloadingEvent(keys, self.medium, removed=False, locality=self.locality)
                    self._events.append(event)
            finished.append(result)
        return finished

    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self._events = self._events or [], None if self._events is None else []
        return events

    def drain_jobs(self) -> None:
        """Wait until no thread touches vLLM's memory. vLLM calls this when its cache is reset, for example
        after a change of weights: chunks then have other names, which no other process knows.
        """
        with self._changed:
            self._cancelled = True
            self._changed.wait_for(lambda: not self._running)
            self._cancelled = False
        self.names.reset()

    def shutdown(self) -> None:
        """Write what was submitted, and release the stores. Raises StoreUnavailableError if one hangs, since
        a thread may still read vLLM's memory.
        """
        self._lookups.shutdown()
        if not self._workers.close(PATIENCE):
            raise StoreUnavailableError(f"KVCacheTier: a store does not answer in {PATIENCE:g} s")
        self._stores.close()

    def _name(self, key: OffloadKey, req_context: ReqContext) -> str | None:
        return self.names.of(key, req_context.req_id, req_context.get_offload_key_position(key))

    def _submit(self, job: TransferJob, move: Callable[[str | None, int, np.ndarray], bool]) -> None:
        """Move a job's chunks in a thread."""
        chunks = self._jobs[job.job_id] = [(key, self._name(key, job.req_context)) for key in job.keys]
        places = [
            (key, name, job.req_context.get_offload_key_position(key) or 0, int(row))
            for (key, name), row in zip(chunks, job.chunk_ids, strict=True)
        ]
        with self._changed:
            self._running += 1
        self._workers.submit(partial(self._run, job.job_id, job.is_promotion, places, move))

    def _run(
        self,
        job: int,
        promotion: bool,
        places: Sequence[tuple[OffloadKey, str | None, int, int]],
        move: Callable[[str | None, int, np.ndarray], bool],
    ) -> None:
        begun, moved = time.perf_counter(), list[OffloadKey]()
        try:
            memory = np.asarray(self._primary_kv_view).view(np.uint8)
            for key, name, end, row in places:
                if not self._cancelled and move(name, end, memory[row]):
                    moved.append(key)
        except Exception:
            log.exception("KVCacheTier: a job of %d chunks failed", len(places))
        finally:
            result = JobResult(
                job,
                len(moved) == len(places),
                moved,
                transfer_time=time.perf_counter() - begun,
                transfer_bytes=len(moved) * self.block_size_bytes,
            )
            self._done.put((result, promotion))
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _store(self, name: str | None, end: int, row: np.ndarray) -> bool:
        return name is None or self._stores.tier.write(name, self.rows.pack(end, row))

    def _load(self, name: str | None, end: int, row: np.ndarray) -> bool:
        def fill(entry: SerializedSnapshot) -> bool:
            self.rows.fill(end, entry, row)
            return True

        return name is not None and bool(use_entry(self._stores.tier, name, fill))


class _Lookups(AsyncLookupManager):  # type: ignore[misc]
    """vLLM's thread for lookups, asked by our names in place of its keys."""

    def __init__(self, tier_type: str, tier: StoreTier) -> None:
        self._tier = tier
        super().__init__(tier_type)

    def batch_lookup(self, keys: Collection[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        return self._tier.stored([key.decode() for key in keys])
