"""SGLang's cache controller, whose threads look up, prefetch and back up, over our stores."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sglang.srt.managers.cache_controller import HiCacheController, PrefetchAck
from sglang.srt.mem_cache.utils import get_storage_hash_str

from ....rigs.servers import ValkeyServer
from .pools import PAGE, allocator, config, device_pool, fill, host_pool, page_of, slots

TOKENS = [*range(7, 7 + 5 * PAGE)]


def controller(pool: Any, group: Any, url: str, kind: str = "mha", **extra: Any) -> Any:
    given = config(url).extra_config | extra
    return HiCacheController(
        allocator(device_pool(kind)), pool, PAGE, group, None, storage_backend="dynamic",
        prefetch_threshold=PAGE, model_name="m", storage_backend_extra_config=given,
    )  # fmt: skip


def back_up(one: Any, pages: int) -> int:
    """Tokens that were stored of TOKENS, whose pages lie in the pool's first ones."""
    hashes = get_storage_hash_str(TOKENS, None, page_size=PAGE)[:pages]
    one.write_storage(slots(*range(pages)), TOKENS[: pages * PAGE], hash_value=hashes)
    return one.ack_backup_queue.get(timeout=20).completed_tokens


def prefetch(one: Any, place: int) -> int:
    """Pages of TOKENS that were found and read, behind one another from page ``place`` of the pool on."""
    operation = one.prefetch("r", TOKENS)
    found = one.prefetch_hit_queue.get(timeout=20)
    assert found is operation
    pages = len(found.hash_value)
    found.host_indices = slots(*range(place, place + pages))
    one.prefetch_buffer.put(found)
    completed = 0
    while True:
        ack: PrefetchAck = one.ack_prefetch_queue.get(timeout=20)
        completed = max(completed, ack.completed_tokens or 0)
        if ack.completed_req:
            return completed // PAGE


@pytest.mark.parametrize("interface_v1", [0, 1])
@pytest.mark.parametrize(
    ("kind", "layout"), [("mha", "page_first"), ("mha", "layer_first"), ("mla", "page_first")]
)
def test_what_one_engine_backs_up_another_prefetches(
    url: str, group: Any, kind: str, layout: str, interface_v1: int
) -> None:
    pool, other = host_pool(kind, layout), host_pool(kind, layout)
    fill(pool)
    first = controller(pool, group, url, kind, interface_v1=interface_v1)
    assert prefetch(first, 6) == 0
    assert back_up(first, 4) == 4 * PAGE
    first.detach_storage_backend()
    second = controller(other, group, url, kind, interface_v1=interface_v1)
    assert prefetch(second, 6) == 4
    for page in range(4):
        assert torch.equal(page_of(pool, page), page_of(other, 6 + page))
    second.detach_storage_backend()


def test_a_store_that_is_out_of_reach_costs_misses_and_no_more(group: Any, server: ValkeyServer) -> None:
    pool = host_pool("mha", "page_first")
    fill(pool)
    one = controller(pool, group, f"{server.url}?timeout=0.5")
    assert back_up(one, 3) == 3 * PAGE
    assert prefetch(one, 6) == 3
    server.kill()
    begun = time.monotonic()
    for _ in range(20):
        assert prefetch(one, 6) == 0
    assert back_up(one, 2) == 0
    assert time.monotonic() - begun < 15, "one that is out is asked now and then only"
    server.start()
    deadline = time.monotonic() + 30
    while back_up(one, 3) != 3 * PAGE:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    one.detach_storage_backend()


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    if ValkeyServer.program() is None:
        pytest.skip("needs redis-server: apt-get install redis-server")
    with ValkeyServer() as made:
        yield made
