"""Objects of LMCache's multiprocess server go to our stores and back, through its own storage manager."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.distributed.storage_manager import StorageManager

from kvcache import InvalidRangeError

SHAPE = MemoryLayoutDesc([torch.Size([2, 3, 8, 8])], [torch.bfloat16])
MODEL = {"model": "m"}
Open = Callable[..., StorageManager]


def open_server(url: str, identity: Any, **options: Any) -> StorageManager:
    """A storage manager, as in LMCache's server, with nothing in memory and our adapter below."""
    plugin = PluginL2AdapterConfig.from_dict({
        "module_path": "kvcache.integrations.lmcache", "class_name": "KVStoreL2Adapter",
        "adapter_params": {"store": url, "identity": identity, **options},
    })  # fmt: skip
    memory = L1MemoryManagerConfig(1 << 20, use_lazy=False, shm_name="")
    return StorageManager(
        StorageManagerConfig(L1ManagerConfig(memory), EvictionConfig("LRU"), L2AdaptersConfig([plugin]))
    )


@pytest.fixture
def server(url: str) -> Iterator[Open]:
    made: list[StorageManager] = []

    def make(identity: Any = MODEL, **options: Any) -> StorageManager:
        made.append(open_server(url, identity, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def key(chunk: int, **changed: Any) -> ObjectKey:
    plain = {"model_name": "m", "kv_rank": ObjectKey.ComputeKVRank(1, 0, 1, 0)}
    return ObjectKey(chunk_hash=ObjectKey.IntHash2Bytes(chunk), **{**plain, **changed})


def content(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE.shapes[0], generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def until(done: Callable[[], bool]) -> None:
    for _ in range(2000):
        if done():
            return
        time.sleep(0.01)
    raise AssertionError("not within 20 s")


def put(one: StorageManager, *keys: ObjectKey) -> None:
    """Write objects whose content is that of their number, and wait until they are stored."""
    memory = one.reserve_write([*keys], SHAPE)
    for name in keys:
        memory[name].tensor.copy_(content(int.from_bytes(name.chunk_hash, "big")))
    ((_, adapter),) = one.l2_adapters()
    one.finish_write([*keys])
    until(lambda: adapter.report_status()["written"] >= len(keys))


def get(one: StorageManager, keys: list[ObjectKey], shape: MemoryLayoutDesc = SHAPE) -> list[torch.Tensor]:
    """The objects that LMCache finds below and reads, the leading ones of ``keys``."""
    handle = one.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(keys, 0, shape)]))
    assert one.wait_prefetch_status(handle, 20)
    result = one.query_prefetch_status(handle)
    assert result is not None
    found = keys[: result.l2_hit_cells[0].popcount()]
    with one.read_prefetched_results(found) as memory:
        tensors = [each.tensor.clone() for each in memory or ()]
    one.finish_read_prefetched(found)
    return tensors


def test_another_server_reads_what_was_stored(server: Open) -> None:
    put(server(), key(1), key(2), key(4))
    found = get(server(), [key(1), key(2), key(3), key(4)])
    assert [torch.equal(one, content(number)) for one, number in zip(found, (1, 2), strict=True)] == [
        True
    ] * 2


@pytest.mark.parametrize(
    "changed",
    [
        {"model_name": "n"},
        {"kv_rank": ObjectKey.ComputeKVRank(2, 0, 2, 0)},
        {"object_group_id": 1},
        {"cache_salt": "of somebody else"},
    ],
    ids=["model", "rank", "group", "salt"],
)
def test_objects_of_another_model_rank_group_or_salt_are_misses(
    server: Open, changed: dict[str, Any]
) -> None:
    put(server(), key(1))
    other = server()
    assert get(other, [key(1, **changed)]) == []
    assert len(get(other, [key(1)])) == 1
    assert get(server(identity={"model": "other weights"}), [key(1)]) == []


def test_a_damaged_object_and_one_of_another_layout_are_misses(server: Open, tmp_path: Path) -> None:
    put(server(), key(1), key(2))
    wider = MemoryLayoutDesc([torch.Size([2, 3, 8, 16])], [torch.bfloat16])
    assert get(server(), [key(1)], wider) == []
    assert get(server(), [key(1)]) == [], "it was dropped, as one that is not what its name says"
    (file,) = (tmp_path / "store").rglob("*.entry")
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    assert get(server(), [key(2)]) == []


def test_deleted_objects_are_gone(server: Open) -> None:
    one = server()
    put(one, key(1), key(2))
    ((_, adapter),) = one.l2_adapters()
    stored = adapter.get_usage().total_bytes_used
    assert stored == 2 * content(1).nbytes
    adapter.delete([key(1)])
    assert adapter.get_usage().total_bytes_used == stored // 2
    other = server()
    assert [len(get(other, [key(number)])) for number in (1, 2)] == [0, 1]


def test_a_model_without_files_here_is_told_once_and_unknown_options_are_refused(
    server: Open, caplog: pytest.LogCaptureFixture
) -> None:
    one = server(identity=None)
    assert get(one, [key(1)]) == get(one, [key(2)]) == []
    assert caplog.text.count("no local files identify the weights of 'm'") == 1
    assert "adapter_params: identity" in caplog.text
    with pytest.raises(InvalidRangeError, match="adapter_params: 'stores' is not an option"):
        server(stores="memory:")
