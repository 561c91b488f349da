"""The adapter that LMCache's server loads in multiprocess mode: an ``L2AdapterInterface``
(lmcache/v1/distributed/l2_adapters) over our stores.

Threads do what was submitted. An event descriptor tells of finished tasks, whose results are asked for once.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from kvcache.integrations.lmcache.chunks import ChunkShape, ConnectorOptions, identity_of_model, object_key
from kvcache.integrations.open_stores import StoresInUse, use_entry
from kvcache.stores import SerializedSnapshot, SnapshotCorruptError, UnknownModelError

try:
    from lmcache.lmcache_native import Bitmap
    from lmcache.utils import TORCH_DTYPE_TO_STR_DTYPE
    from lmcache.v1.distributed.internal_api import L2StoreResult
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
    from lmcache.v1.platform import create_event_notifier
except ImportError as error:
    raise ImportError(
        f"kvcache.integrations.lmcache: LMCache was not found; it needs 'lmcache>=0.5.6' ({error})"
    ) from error

__all__ = ["KVStoreL2Adapter"]

log = logging.getLogger("kvcache")


class _Tasks:
    """The results of one kind of task, and the descriptor that tells of them."""

    def __init__(self) -> None:
        self._notifier = create_event_notifier()
        self._results: dict[int, Any] = {}
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return int(self._notifier.fileno())

    def finish(self, task: int, result: Any) -> None:
        with self._lock:
            self._results[task] = result
        self._notifier.notify()

    def take(self, task: int) -> Any:
        """A task's result, once; None: not finished."""
        with self._lock:
            return self._results.pop(task, None)

    def take_all(self) -> dict[int, Any]:
        with self._lock:
            results, self._results = self._results, {}
            return results

    def close(self) -> None:
        self._notifier.close()


class KVStoreL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """Objects of LMCache's server in a tier of stores, named in ``--l2-adapter`` by type "plugin".

    A missing or damaged object is not found. An unreachable store is not used for a while. Objects of a model
    whose files are not on this machine, and that ``identity`` does not name, are not stored.

    Raises InvalidRangeError for an unknown option, and StoreError if a store does not open.
    """

    def __init__(self, adapter_params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__()
        options = ConnectorOptions.of("adapter_params", adapter_params)
        self._given = options.identity
        self._identities: dict[str, Mapping[str, Any] | None] = {}
        self._stores = StoresInUse(options.store, 0)
        self._tier = self._stores.tier
        self._numbers = itertools.count()
        self._stored, self._found, self._loaded = _Tasks(), _Tasks(), _Tasks()
        self._sizes: dict[Any, int] = {}
        """By key, the bytes that were told as stored."""
        self._threads = ThreadPoolExecutor(options.threads, thread_name_prefix="kvcache-lmcache")
        log.info("KVStoreL2Adapter: objects go to %s", ", ".join(options.store))

    def get_store_event_fd(self) -> int:
        return self._stored.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._found.fileno()

    def get_load_event_fd(self) -> int:
        return self._loaded.fileno()

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._submit(self._stored, self._store, L2StoreResult(False, 0), keys, objects)

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        return self._stored.take_all()

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Any) -> int:
        return self._submit(self._found, self._look_up, Bitmap(len(keys)), keys)

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self._found.take(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """A no-op: a store's entry may be evicted between a lookup and its load, which then finds nothing."""

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._submit(self._loaded, self._load, Bitmap(len(keys)), keys, objects)

    def query_load_result(self, task_id: int) -> Any:
        return self._loaded.take(task_id)

    def delete(self, keys: list[Any]) -> None:
        names = [self._name(key) for key in keys]
        self._tier.delete([name for name in names if name is not None])
        self._notify_keys_deleted(keys, [self._sizes.pop(key, 0) for key in keys])

    def report_status(self) -> dict[str, Any]:
        return {"is_healthy": not self._tier.away, "written": self._tier.written, "errors": self._tier.errors}

    def close(self) -> None:
        """Release the stores, after what was submitted has ended."""
        self._threads.shutdown()
        self._stores.close()
        for tasks in (self._stored, self._found, self._loaded):
            tasks.close()

    def _submit(self, tasks: _Tasks, call: Callable[..., Any], failed: Any, *args: Any) -> int:
        task = next(self._numbers)

        def run() -> None:
            result = failed
            try:
                result = call(*args)
            except Exception:
                log.exception("KVStoreL2Adapter: a task failed")
            tasks.finish(task, result)

        self._threads.submit(run)
        return task

    def _name(self, key: Any) -> str | None:
        """The name of an object in stores; None: nothing identifies its model."""
        model = key.model_name
        if model not in self._identities:
            try:
                self._identities[model] = self._given or identity_of_model(model, "KVStoreL2Adapter")
            except UnknownModelError as error:
                self._identities[model] = None
                log.warning("%s; its objects are neither stored nor looked up", error)
        identity = self._identities[model]
        return None if identity is None else object_key(identity, key)

    def _names(self, keys: Sequence[Any]) -> dict[int, str]:
        """The names of keys that have one, by index."""
        names = {i: self._name(key) for i, key in enumerate(keys)}
        return {i: name for i, name in names.items() if name is not None}

    def _store(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
        names = self._names(keys)
        there = dict(zip(names, self._tier.stored([*names.values()]), strict=True))
        written = [i for i, name in names.items() if not there[i] and self._write(name, objects[i])]
        sizes = [objects[i].get_size() for i in written]
        if written:
            self._sizes.update(zip((keys[i] for i in written), sizes, strict=True))
            self._notify_keys_stored([keys[i] for i in written], sizes)
        return L2StoreResult(len(written) + sum(there.values()) == len(keys), sum(sizes))

    def _write(self, name: str, memory: Any) -> bool:
        return self._tier.write(name, _shape_of(memory).pack(np.frombuffer(memory.byte_array, np.uint8)))

    def _look_up(self, keys: Sequence[Any]) -> Any:
        names, bitmap = self._names(keys), Bitmap(len(keys))
        for i, there in zip(names, self._tier.stored([*names.values()]), strict=True):
            if there:
                bitmap.set(i)
        return bitmap

    def _load(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
        names, bitmap = self._names(keys), Bitmap(len(keys))
        for i, name in names.items():
            if use_entry(self._tier, name, partial(_fill, objects[i])):
                bitmap.set(i)
        self._notify_keys_accessed([key for i, key in enumerate(keys) if bitmap.test(i)])
        return bitmap


def _shape_of(memory: Any) -> ChunkShape:
    return ChunkShape(
        memory.get_memory_format().name,
        tuple(tuple(shape) for shape in memory.get_shapes()),
        tuple(TORCH_DTYPE_TO_STR_DTYPE[dtype] for dtype in memory.get_dtypes()),
    )


def _fill(memory: Any, entry: SerializedSnapshot) -> bool:
    shape, data = ChunkShape.unpack(entry)
    target = np.frombuffer(memory.byte_array, np.uint8)
    if shape != _shape_of(memory) or target.size != data.size:
        raise SnapshotCorruptError(f"load: an object of {shape}; LMCache asks for {_shape_of(memory)}")
    target[:] = data
    return True
