"""Chunks of LMCache go to our stores and come back, through its remote backend and its own memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

LAYERS, CHUNK, HEADS, DIM = 3, 8, 2, 4
Backend = Callable[..., RemoteBackend]


@pytest.fixture
def backend(url: str) -> Iterator[Backend]:
    """A remote backend with our connector as its plugin, and a CPU backend of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    made: list[RemoteBackend] = []

    def make(
        store: Any = url, serde: str = "naive", model: str = "m", layers: int = LAYERS, **options: Any
    ) -> RemoteBackend:
        given = {"store": store, "identity": {"model": "m"}, **options}
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK, max_local_cpu_size=0.01, remote_serde=serde, remote_storage_plugins=["kvcache"],
            extra_config={
                "remote_storage_plugin.kvcache.module_path": "kvcache.integrations.lmcache",
                "remote_storage_plugin.kvcache.class_name": "KVStoreConnector",
                **{f"kvcache.{name}": value for name, value in given.items() if value is not None},
            },
        )  # fmt: skip
        metadata = LMCacheMetadata(
            model, 1, 1, 0, 0, torch.bfloat16, (layers, 2, CHUNK, HEADS, DIM), chunk_size=CHUNK
        )
        memory = LocalCPUBackend(config, metadata, "cpu")
        made.append(RemoteBackend(config, metadata, loop, memory, "cpu", plugin_name="kvcache"))
        return made[-1]

    yield make
    for one in made:
        if one.connection is not None:
            one.close()
        one.local_cpu_backend.close()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def key(chunk: int, **given: Any) -> CacheEngineKey:
    plain = {"model_name": "m", "world_size": 1, "worker_id": 0, "dtype": torch.bfloat16}
    return CacheEngineKey(chunk_hash=chunk, **{**plain, **given})


def chunk(one: RemoteBackend, seed: int, tokens: int = CHUNK, layers: int = LAYERS) -> Any:
    shape = torch.Size([2, layers, tokens, HEADS * DIM])
    found = one.local_cpu_backend.allocate([shape], [torch.bfloat16], MemoryFormat.KV_2LTD)
    found.tensor.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
    return found


def put(one: RemoteBackend, *chunks: tuple[CacheEngineKey, Any]) -> None:
    for name, memory in chunks:
        one.submit_put_task(name, memory).result(20)


def test_chunks_come_back_in_another_engine_whole_and_partial(backend: Backend) -> None:
    first = backend()
    whole, partial = chunk(first, 0), chunk(first, 1, tokens=5)
    put(first, (key(1), whole), (key(2), partial))
    assert whole.get_ref_count() == partial.get_ref_count() == 1, "a stored chunk is its owner's alone again"
    second = backend()
    assert second.batched_contains([key(1), key(2), key(3)]) == 2
    found = second.batched_get_blocking([key(1), key(2), key(3)])
    assert torch.equal(found[0].tensor, whole.tensor)
    assert found[1].tensor.shape[2] == 5
    assert torch.equal(found[1].tensor, partial.tensor)
    assert found[2] is None


def test_compressed_chunks_come_back_in_engines_that_compress_alike(backend: Backend) -> None:
    """LMCache's CacheGen hands over bytes without a dtype; it knows a few models only."""
    options: dict[str, Any] = {"model": "mistralai/Mistral-7B-Instruct-v0.2", "layers": 32}
    first = backend(serde="cachegen", **options)
    memory = chunk(first, 0, layers=32)
    put(first, (key(1), memory))
    found = backend(serde="cachegen", **options).get_blocking(key(1))
    expected = first.deserializer.deserialize(first.serializer.serialize(memory))
    assert torch.equal(found.tensor, expected.tensor)
    assert not backend(**options).contains(key(1)), "an engine that does not compress cannot read it"


def test_lookups_ahead_of_time_find_and_read_the_leading_chunks(backend: Backend) -> None:
    one = backend()
    put(one, *((key(i), chunk(one, i)) for i in (1, 2, 4)))
    names = [key(i) for i in range(1, 5)]
    ask = one.batched_async_contains("r", names)
    assert asyncio.run_coroutine_threadsafe(ask, one.loop).result(20) == 2
    read = one.batched_get_non_blocking("r", names)
    assert len(asyncio.run_coroutine_threadsafe(read, one.loop).result(20)) == 2


@pytest.mark.parametrize(
    "changed",
    [
        {"model_name": "n"},
        {"worker_id": 1},
        {"dtype": torch.float16},
        {"request_configs": {"lmcache.tag.user": "x"}},
    ],
    ids=["model", "rank", "dtype", "tag"],
)
def test_chunks_of_another_model_rank_dtype_or_tag_are_misses(
    backend: Backend, changed: dict[str, Any]
) -> None:
    one = backend()
    put(one, (key(1), chunk(one, 1)))
    assert one.contains(key(1))
    assert not one.contains(key(1, **changed))
    assert not backend(identity={"model": "other weights"}).contains(key(1))


def test_a_damaged_chunk_is_a_miss_and_is_stored_again(backend: Backend, tmp_path: Path) -> None:
    one = backend()
    memory = chunk(one, 1)
    put(one, (key(1), memory))
    (file,) = (tmp_path / "store").rglob("*.entry")
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    assert one.get_blocking(key(1)) is None
    assert not one.contains(key(1))
    put(one, (key(1), memory))
    assert torch.equal(one.get_blocking(key(1)).tensor, memory.tensor)


def test_a_chunk_can_be_removed(backend: Backend) -> None:
    one = backend()
    put(one, (key(1), chunk(one, 1)))
    assert [one.remove(key(1)), one.remove(key(1))] == [True, False]
    assert not one.contains(key(1))


def test_a_full_store_refuses_and_keeps_no_memory(backend: Backend, tmp_path: Path) -> None:
    one = backend(f"file://{tmp_path / 'small'}?budget=200")
    memory = chunk(one, 1)
    future = one.submit_put_task(key(1), memory)
    with pytest.raises(Exception, match="no store accepted the chunk m@1@0@1@bfloat16"):
        future.result(20)
    assert memory.get_ref_count() == 1
    assert not one.contains(key(1))


def test_a_model_whose_files_are_not_here_and_unknown_options_are_refused(
    backend: Backend, caplog: Any
) -> None:
    for options, told in (
        ({"identity": None}, "no local files identify the weights of 'm'"),
        ({"threads": 0}, "kvcache.threads=0; it must be at least 1"),
        ({"stores": "memory:"}, "'kvcache.stores' is not an option"),
    ):
        caplog.clear()
        assert backend(**options).connection is None, "LMCache logs why, and goes on without"
        assert told in caplog.text
