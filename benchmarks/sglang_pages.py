"""Pages of an 8B model between SGLang's host pool and a folder: our storage backend and SGLang's own.

    .venv-sglang/bin/python -m benchmarks.sglang_pages

Both are called as SGLang's cache controller calls them, in turns, in one process; the floor is a plain copy
of the same bytes in memory. ``make test-sglang`` makes the environment.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# isort: off
import tests.integrations.sglang.running.no_pictures  # noqa: F401  before SGLang is imported

# isort: on
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls

from kvcache.integrations.sglang import HiCacheStore

PAGE, LAYERS, HEADS, DIM = 64, 32, 8, 128
KEYS = [f"{i:064x}" for i in range(1, 33)]


def host_pool(layout: str) -> Any:
    device = MHATokenToKVPool(PAGE, PAGE, torch.bfloat16, HEADS, DIM, LAYERS, "cpu", False)
    (found,) = device.get_device_pool_infos()
    capacity = PAGE * len(KEYS)
    pool = get_mha_host_pool_cls(found.buffer_info)(
        found.buffer_info, 1.0, 0, PAGE, layout, pin_memory=False, device_capacity_tokens=capacity,
        start_layer=0, end_layer=LAYERS,
    )  # fmt: skip
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape))
    return pool


def config(**extra: Any) -> HiCacheStorageConfig:
    return HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, True, "m", extra_config=extra)


def ways(pool: Any, folder: Path) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """By name: write all pages, read all pages."""
    slots = torch.arange(PAGE * len(KEYS))
    ours = HiCacheStore(config(store=f"file://{folder / 'ours'}", identity={"model": "m"}, interface_v1=1))
    ours.register_mem_pool_host(pool)
    theirs = HiCacheFile(config(file_storage_path=str(folder / "theirs")))
    copy = pool.kv_buffer.clone()

    def get() -> None:
        found = theirs.batch_get(KEYS, [pool.get_dummy_flat_data_page() for _ in KEYS])
        for i, page in enumerate(found):
            pool.set_from_flat_data_page(i * PAGE, page)

    return {
        "a copy in memory": (lambda: copy.copy_(pool.kv_buffer), lambda: pool.kv_buffer.copy_(copy)),
        "HiCacheStore, interface_v1": (
            lambda: ours.batch_set_v1(KEYS, slots),
            lambda: ours.batch_get_v1(KEYS, slots),
        ),
        "SGLang's file backend": (
            lambda: theirs.batch_set(KEYS, [pool.get_data_page(i * PAGE) for i in range(len(KEYS))]),
            get,
        ),
    }


def timed(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print("| | write, GB/s | read, GB/s |\n|---|---|---|")
    for layout in ("page_first", "layer_first"):
        pool = host_pool(layout)
        nbytes = pool.size_per_token * PAGE * len(KEYS)
        found: dict[str, list[tuple[float, float]]] = {}
        for _ in range(rounds):
            folder = Path(tempfile.mkdtemp(prefix="hicache-"))
            for name, (write, read) in ways(pool, folder).items():
                found.setdefault(name, []).append((timed(write), timed(read)))
            shutil.rmtree(folder)
        for name, times in found.items():
            rates = [sorted(nbytes / 1e9 / one[i] for one in times) for i in range(2)]
            cells = [f"{statistics.median(rate):.2f} ({rate[0]:.2f} to {rate[-1]:.2f})" for rate in rates]
            print(f"| {name}, {layout} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
