"""What LMCache loads: a ``RemoteConnector`` (lmcache/v1/storage_backend/connector) over our stores."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from kvcache.cache import NotSupportedError
from kvcache.integrations.lmcache.chunks import ChunkShape, ConnectorOptions, chunk_key, identity_of_model
from kvcache.integrations.open_stores import StoresInUse, use_entry
from kvcache.stores import SnapshotCorruptError, StoreUnavailableError

try:
    from lmcache.utils import TORCH_DTYPE_TO_STR_DTYPE
    from lmcache.v1.memory_management import MemoryFormat
    from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector
except ImportError as error:
    raise ImportError(
        f"kvcache.integrations.lmcache: LMCache was not found; it needs 'lmcache>=0.5.6' ({error})"
    ) from error

__all__ = ["KVStoreConnector"]

log = logging.getLogger("kvcache")
T = TypeVar("T")

_NAMES = {**TORCH_DTYPE_TO_STR_DTYPE, None: "bytes"}
"""Of dtypes; chunks that LMCache has compressed have none."""
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class KVStoreConnector(RemoteConnector):  # type: ignore[misc]
    """Chunks of LMCache in a tier of stores.

    A chunk that no store has, or that is damaged, is a miss, and is computed again. A store that is out of
    reach is left alone for a while.

    Raises InvalidRangeError for an unknown option, StoreError where a store does not open,
    UnknownModelError where nothing tells which weights are loaded.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, local_cpu_backend: Any, config: Any) -> None:
        super().__init__(local_cpu_backend.config, local_cpu_backend.metadata)
        options = ConnectorOptions.parse((config.extra_config if config else None) or {})
        self._identity = dict(options.identity or identity_of_model(local_cpu_backend.metadata.model_name))
        serde = local_cpu_backend.config.remote_serde
        if serde != "naive":  # its chunks are of no use to an engine with another one
            self._identity["remote_serde"] = serde
        self._loop, self._memory = loop, local_cpu_backend
        self._stores = StoresInUse(options.store, 0)
        self._tier = self._stores.tier
        self._threads = ThreadPoolExecutor(options.threads, thread_name_prefix="kvcache-lmcache")
        log.info("KVStoreConnector: chunks go to %s", ", ".join(options.store))

    async def exists(self, key: Any) -> bool:
        """Whether a chunk is stored. It becomes the most recently used."""
        return await self._run(self.exists_sync, key)

    def exists_sync(self, key: Any) -> bool:
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: list[Any]) -> int:
        """How many leading chunks are stored."""
        return self._tier.prefix([self._name(key) for key in keys])

    async def batched_async_contains(self, lookup_id: str, keys: list[Any], pin: bool = False) -> int:
        return await self._run(self.batched_contains, keys)

    async def get(self, key: Any) -> Any:
        """A chunk in LMCache's own memory; None: no store has it whole, or there is no memory for it."""
        return await self._run(self._get, key)

    async def put(self, key: Any, memory_obj: Any) -> None:
        """Store a chunk, unless it is there; StoreUnavailableError where no store took it."""
        await self._run(self._put, key, memory_obj)

    def remove_sync(self, key: Any) -> bool:
        """Forget a chunk. False: it was not stored."""
        name = self._name(key)
        (there,) = self._tier.stored([name])
        self._tier.drop(name)
        return there

    async def list(self) -> list[str]:  # named by LMCache
        raise NotSupportedError("list: stores know chunks by digests of their keys, and cannot tell the keys")

    async def close(self) -> None:
        """Let go of the stores, after the calls under way."""
        self._threads.shutdown()
        self._stores.close()

    def _name(self, key: Any) -> str:
        return chunk_key(self._identity, key)

    async def _run(self, call: Callable[..., T], *args: Any) -> T:
        return await self._loop.run_in_executor(self._threads, call, *args)

    def _get(self, key: Any) -> Any:
        return use_entry(self._tier, self._name(key), lambda found: self._filled(*ChunkShape.unpack(found)))

    def _filled(self, shape: ChunkShape, data: np.ndarray) -> Any:
        """A memory object with these bytes."""
        if shape.form not in MemoryFormat.__members__ or not set(shape.dtypes) <= _DTYPES.keys():
            raise SnapshotCorruptError(f"load: a chunk of {shape.form}, {', '.join(shape.dtypes)}")
        memory = self._memory.allocate(
            [self.meta_shapes[0].__class__(one) for one in shape.shapes],
            [_DTYPES[name] for name in shape.dtypes],
            MemoryFormat[shape.form],
        )
        if memory is None:
            return None
        target = np.frombuffer(memory.byte_array, np.uint8)
        if target.size != data.size:
            memory.ref_count_down()
            raise SnapshotCorruptError(f"load: a chunk of {data.size} bytes; its shapes take {target.size}")
        target[:] = data
        return memory

    def _put(self, key: Any, memory_obj: Any) -> None:
        shape = ChunkShape(
            memory_obj.get_memory_format().name,
            tuple(tuple(one) for one in memory_obj.get_shapes()),
            tuple(_NAMES[one] for one in memory_obj.get_dtypes()),
        )
        data = np.frombuffer(memory_obj.byte_array, np.uint8)
        if not self._tier.write(self._name(key), shape.pack(data)):
            raise StoreUnavailableError(f"put: no store took the chunk {key.to_string()}")
