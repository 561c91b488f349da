"""SGLang's own host pools, factory and cache controller over our stores, on the CPU: ``make test-sglang``.

Without SGLang nothing is collected.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = importlib.util.find_spec("sglang") is not None
collect_ignore_glob = [] if HERE else ["test_*.py"]


if HERE:
    from . import no_pictures  # noqa: F401  before SGLang is imported


@pytest.fixture(scope="session")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A process group of this process alone. What hashes pages is compiled, if it was not."""
    import torch.distributed as dist
    from sglang.srt.mem_cache.utils import get_storage_hash_str
    from sglang.srt.runtime_context import get_parallel

    from .pools import PAGE

    get_storage_hash_str([1] * PAGE, None, page_size=PAGE)  # else prefetches run out of time meanwhile

    alone = {
        f"{name}_{what}": int(what == "size")
        for name in ("tp", "pp", "attn_dcp")
        for what in ("rank", "size")
    }
    get_parallel().override_permanently(**alone)
    file = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path / 'store'}"


@pytest.fixture(autouse=True)
def whatever_memory_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang leaves 10 GiB of the host's memory to others; the pools here have kilobytes."""
    from sglang.srt.mem_cache.pool_host import base

    monkeypatch.setattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)
