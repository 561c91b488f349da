"""LMCache's tests of connectors and of injected faults, over our stores.

``KVStoreConnector`` is in the place of FSConnector. LMCache injects its faults before an adapter of its
multiprocess mode, for which we have none: there a store is in the place of MockL2Adapter's dictionary.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import tempfile
from collections import Counter
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lmcache.v1.distributed.l2_adapters.mock_l2_adapter as mock
import torch
from lmcache.v1.memory_management import TensorMemoryObj
from lmcache.v1.storage_backend.connector import fs_connector

from kvcache.integrations.lmcache import KVStoreConnector
from kvcache.stores import FileStore

LEFT_OUT = {
    "test_redis_*": "is of LMCache's own connectors for Redis",
    "test_cluster_*": "is of LMCache's own connectors for Redis",
}
"""Patterns of tests that are not run, and why."""

_used: Counter[str] = Counter()


class _Connector(KVStoreConnector):  # type: ignore[misc]
    """Stores in the folders that FSConnector would write to."""

    def __init__(
        self, loop: Any, memory: Any, config: Any, plugin_name: str | None, base_paths_str: str | None
    ) -> None:
        paths = base_paths_str or config.extra_config[f"remote_storage_plugin.{plugin_name}.base_path"]
        stores = [f"file:///{path.strip('/')}?durable=no" for path in paths.split(",")]
        options = {"kvcache.store": stores, "kvcache.identity": {"model": "m"}}
        super().__init__(loop, memory, SimpleNamespace(extra_config=options))
        _used["KVStoreConnector"] += 1


class _Shelf(MutableMapping[Any, Any]):
    """LMCache's memory objects by their keys, whose bytes are in a store."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.store = FileStore(self.folder.name, durable=False)
        self.metadata: dict[Any, Any] = {}

    def name(self, key: Any) -> str:
        return hashlib.sha256(repr(key).encode()).hexdigest()

    def __setitem__(self, key: Any, memory: Any) -> None:
        assert self.store.put(self.name(key), [memory.raw_tensor.contiguous().numpy().tobytes()])
        self.metadata[key] = copy.deepcopy(memory.metadata)

    def __getitem__(self, key: Any) -> Any:
        (found,) = self.store.stat([self.name(key)])
        if found is None:
            raise KeyError(key)
        data, metadata = bytearray(found.nbytes), copy.deepcopy(self.metadata[key])
        assert self.store.get_into(self.name(key), data)
        return TensorMemoryObj(torch.frombuffer(data, dtype=metadata.dtype), metadata, None)

    def __delitem__(self, key: Any) -> None:
        del self.metadata[key]
        self.store.delete(self.name(key))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.metadata)

    def __len__(self) -> int:
        return len(self.metadata)


_plain = mock.MockL2Adapter.__init__


def _with_a_store(self: Any, config: Any) -> None:
    _plain(self, config)
    self._memory_objects = _Shelf()
    _used["FileStore"] += 1


def theirs() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """Where LMCache makes its own, by what it imports when it does."""
    own = fs_connector.FSConnector
    fs_connector.FSConnector, mock.MockL2Adapter.__init__ = _Connector, _with_a_store
    try:
        yield
    finally:
        fs_connector.FSConnector, mock.MockL2Adapter.__init__ = own, _plain


@contextlib.contextmanager
def prepared(paths: Sequence[Path]) -> Iterator[tuple[Sequence[Path], Counter[str]]]:
    yield paths, _used
