"""The connector that LMCache loads: a ``RemoteConnector`` (lmcache/v1/storage_backend/connector) over our
stores.
"""

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
"""The names of dtypes; chunks compressed by LMCache have none."""
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class KVStoreConnector(RemoteConnector):  # type: ignore[misc]
    """Chunks of LMCache in a tier of stores.

    A missing or damaged chunk is a miss and is computed again. An unreachable store is not used for a while.

    Raises InvalidRangeError for an unknown option, StoreError if a store does not open, and UnknownModelError
    if the loaded weights cannot be identified.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, local_cpu_backend: Any, config: Any) -> None:
        super().__init__(local_cpu_backend.config, local_cpu_backend.metadata)
        options = ConnectorOptions.parse((config.extra_config if config else None) or {})
        self._identity = dict(options.identity or identity_of_model(local_cpu_backend.metadata.model_name))
        serde = local_cpu_backend.config.remote_serde
        if serde != "naive":  # engines with another serializer cannot read such chunks
            self._identity["remote_serde"] = serde
        self._loop, self._memory = loop, local_cpu_backend
        self._stores = StoresInUse(options.store, 0)
        self._tier = self._stores.tier
        self._threads = ThreadPoolExecutor(options.threads, thread_name_prefix="kvcache-lmcache")
        log.info(
            "KVStoreConnector: chunks go to %s, from this process; LMCache's multiprocess server asks no "
            "remote storage plugin: there, name KVStoreL2Adapter in --l2-adapter",
            ", ".join(options.store),
        )

    async def exists(self, key: Any) -> bool:
        """Whether a chunk is stored. It becomes the most recently used."""
        return await self._run(self.exists_sync, key)

    def exists_sync(self, key: Any) -> bool:
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: list[Any]) -> int:
        """The number of leading chunks that are stored."""
        return self._tier.prefix([self._name(key) for key in keys])

    async def batched_async_contains(self, lookup_id: str, keys: list[Any], pin: bool = False) -> int:
        return await self._run(self.batched_contains, keys)

    async def get(self, key: Any) -> Any:
        """A chunk in LMCache's own memory; None if no store has an intact copy, or if there is no memory for
        it.
        """
        return await self._run(self._get, key)

    async def put(self, key: Any, memory_obj: Any) -> None:
        """Store a chunk unless it is stored already. Raises StoreUnavailableError if no store accepted it."""
        await self._run(self._put, key, memory_obj)

    def remove_sync(self, key: Any) -> bool:
        """Delete a chunk. Returns False if it was not stored."""
        name = self._name(key)
        (there,) = self._tier.stored([name])
        self._tier.drop(name)
        return there

    async def list(self) -> list[str]:  # named by LMCache
        raise NotSupportedError("list: stores know only digests of chunks' keys, and cannot list the keys")

    async def close(self) -> None:
        """Release the stores, after pending calls have completed."""
        self._threads.shutdown()
        self._stores.close()

    def _name(self, key: Any) -> str:
        return chunk_key(self._identity, key)

    async def _run(self, call: Callable[..., T], *args: Any) -> T:
        return await self._loop.run_in_executor(self._threads, call, *args)

    def _get(self, key: Any) -> Any:
        return use_entry(self._tier, self._name(key), lambda entry: self._filled(*ChunkShape.unpack(entry)))

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
            raise StoreUnavailableError(f"put: no store accepted the chunk {key.to_string()}")
