"""SGLang's device and host pools of small models, and our storage backend as its factory makes it."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory

PAGE, SLOTS, LAYERS = 4, 64, 3


def device_pool(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    if kind == "mla":
        return MLATokenToKVPool(SLOTS, PAGE, dtype, 16, 8, LAYERS, "cpu", False)
    values = 4 if kind == "uneven" else 8
    return MHATokenToKVPool(SLOTS, PAGE, dtype, 2, 8, LAYERS, "cpu", False, v_head_dim=values)


def allocator(pool: Any) -> Any:
    return PagedTokenToKVPoolAllocator(SLOTS, PAGE, pool.dtype, "cpu", pool, False)


def host_pool(kind: str, layout: str, dtype: torch.dtype = torch.float32, first: int = 0) -> Any:
    """A host pool of 2 * SLOTS slots, zero, for LAYERS layers from ``first`` on."""
    device = device_pool(kind, dtype)
    (found,) = device.get_device_pool_infos()
    info = found.buffer_info
    more: dict[str, Any] = {"target_layer_num": LAYERS} if kind == "mla" else {}
    made = MLATokenToKVPoolHost if kind == "mla" else get_mha_host_pool_cls(info)
    pool = made(
        info, 2.0, 0, PAGE, layout, pin_memory=False, device_capacity_tokens=SLOTS, start_layer=first,
        end_layer=first + LAYERS, **more,
    )  # fmt: skip
    for buffer in buffers(pool):
        buffer.zero_()
    return pool


def buffers(pool: Any) -> list[torch.Tensor]:
    if isinstance(pool.kv_buffer, torch.Tensor):
        return [pool.kv_buffer]
    return [*pool.kv_buffer]


def fill(pool: Any, seed: int = 0) -> None:
    """Random numbers in all slots."""
    random = torch.Generator().manual_seed(seed)
    for buffer in buffers(pool):
        buffer.copy_(torch.randn(buffer.shape, generator=random))


def slots(*pages: int) -> torch.Tensor:
    """The slots of a pool's pages."""
    return torch.tensor([page * PAGE + i for page in pages for i in range(PAGE)], dtype=torch.int64)


def config(url: str | list[str], **given: Any) -> HiCacheStorageConfig:
    extra = {
        "backend_name": "kvcache", "module_path": "kvcache.integrations.sglang", "class_name": "HiCacheStore",
        "store": url, "identity": {"model": "m"}, "interface_v1": 1, **given.pop("extra", {}),
    }  # fmt: skip
    plain = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True,
        "model_name": "m",
    }  # fmt: skip
    return HiCacheStorageConfig(**{**plain, **given}, extra_config=extra)


def storage(pool: Any, url: str | list[str], **given: Any) -> Any:
    """The backend as SGLang makes it, for ``--hicache-storage-backend dynamic``."""
    made = StorageBackendFactory.create_backend("dynamic", config(url, **given), pool)
    made.register_mem_pool_host(pool)
    made.on_host_pools_registered()
    return made


def page_of(pool: Any, page: int) -> torch.Tensor:
    """All bytes of a page, in whatever order the pool has them."""
    return torch.cat([
        buffer.reshape(-1).view(torch.uint8)[_offsets(pool, buffer, page)] for buffer in buffers(pool)
    ])  # fmt: skip


def _offsets(pool: Any, buffer: torch.Tensor, page: int) -> torch.Tensor:
    """The bytes of a page within a buffer, found by writing to the page's slots of a zero copy."""
    marked = torch.zeros_like(buffer)
    shape = list(buffer.shape)
    if pool.size in shape:
        marked.movedim(shape.index(pool.size), 0)[page * PAGE : (page + 1) * PAGE] = 1
    else:
        marked.movedim(shape.index(pool.page_num), 0)[page] = 1
    wide = marked.reshape(-1, 1).bool().expand(-1, buffer.element_size())
    return wide.reshape(-1).nonzero().reshape(-1)
