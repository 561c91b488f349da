"""The two sides of the connector, composed from their parts without importing vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from kvcache.cache import NotSupportedError
from kvcache.integrations.open_stores import StoresInUse, at_exit
from kvcache.integrations.vllm.counters import Counters
from kvcache.integrations.vllm.lookups import Lookups, stored_pages
from kvcache.integrations.vllm.naming import Pages
from kvcache.integrations.vllm.options import ConnectorOptions
from kvcache.integrations.vllm.planner import Planner, Role
from kvcache.integrations.vllm.transfers import PATIENCE, DeviceBlocks, Transfers
from kvcache.integrations.vllm.work import Workers

__all__ = ["SchedulerSide", "WorkerSide"]


class SchedulerSide:
    """Matches and plans; ``planner`` is set when all workers have reported their page formats."""

    def __init__(self, options: ConnectorOptions, identity: Mapping[str, Any], block_size: int) -> None:
        self.counters = Counters()
        self.page_tokens = options.tokens_of_page(block_size)
        self._options, self._identity, self._block_size = options, dict(identity), block_size
        self._stores = StoresInUse(options.store, options.host_memory)
        self._workers = Workers("kvcache-lookup", options.lookup_threads)
        self.planner: Planner | None = None
        at_exit(self.close)

    def begin(self, settings: Mapping[int, str], reads: bool, writes: bool) -> Planner:
        """``settings`` of each rank's pages, JSON texts. Raises NotSupportedError where ranks differ."""
        if len({*settings.values()}) != 1 or sorted(settings) != [*range(len(settings))]:
            raise NotSupportedError(
                f"KVCacheConnector: the pages of the ranks are {dict(settings)}; they must be equal"
            )
        pages = Pages(self._identity, json.loads(settings[0]), self.page_tokens, len(settings))
        options = self._options
        lookups = Lookups(
            partial(stored_pages, self._stores.tier),
            self._workers,
            options.lookup_wait,
            options.lookup_timeout,
            self.counters,
        )
        role = Role(reads, writes, options.save_generated)
        self.planner = Planner(pages, self._block_size, lookups, self.counters, role)
        return self.planner

    def close(self) -> None:
        if self._workers.close(PATIENCE):
            self._stores.close()


class WorkerSide:
    """Loads and saves of one rank."""

    def __init__(self, options: ConnectorOptions, rank: int, cache: DeviceBlocks) -> None:
        self.counters = Counters()
        self._stores = StoresInUse(options.store, options.host_memory)
        workers = Workers("kvcache-load", options.load_threads)
        self.transfers = Transfers(rank, cache, self._stores.tier, workers, self.counters, options.save_wait)
        at_exit(self.close)

    def close(self) -> None:
        if self.transfers.close():
            self._stores.close()
