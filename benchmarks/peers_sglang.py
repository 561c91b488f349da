"""SGLang's tests of its storage of pages in files, with ours in the place of HiCacheFile.

They store pages of some bytes under a key, without a pool of SGLang's: a pool of pages of that size stands
in. Its budget counts the bytes of pages, ours those of whole entries: pages are stored ``LONGER``, and the
budget has room for what an entry has besides.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

import tests.integrations.sglang.running.no_pictures  # noqa: F401  before SGLang is imported
from benchmarks.peers_tests import load, named
from kvcache.integrations.sglang import HiCacheStore

LONGER, BESIDES = 1000, 1.05

EVICTOR = "looks into the evictor of HiCacheFile, or the names of its files"
NAMES = "is of HiCacheFile's cache of file names"
LEFT_OUT = {
    "test_*_default_is_*": "is of HiCacheFile's settings in the environment",
    **dict.fromkeys(("test_scan_*", "test_*cp_*", "test_*mla_*", "test_*_external_file"), EVICTOR),
    **dict.fromkeys(("test_*_min_free", "test_pre_reservation_*", "test_eviction_ratio_*"), EVICTOR),
    **dict.fromkeys(("test_basic_lru_*", "test_value_larger_*", "test_repeated_set_*"), EVICTOR),
    **dict.fromkeys(("test_clear_*", "test_no_config_*"), EVICTOR),
    **dict.fromkeys(("test_metadata_*", "test_*_metadata_cache", "test_*_populates_cache"), NAMES),
    **dict.fromkeys(("test_disabled_by_default", "test_batch_exists_bypass_*"), NAMES),
}
"""Patterns of tests that are not run, and why."""

_used: Counter[str] = Counter()
_modules: list[ModuleType] = []


class _File(HiCacheStore):  # type: ignore[misc]
    """A FileStore in the folder that HiCacheFile would write to."""

    def __init__(self, config: Any, file_path: str) -> None:
        size = int((config.extra_config or {}).get("max_size") or 0)
        budget = f"&budget={int(size * LONGER * BESIDES)}" if size else ""
        options = {
            "store": f"file://{file_path}?durable=no{budget}",
            "identity": {"model": config.model_name},
        }
        super().__init__(SimpleNamespace(**{**vars(config), "extra_config": options}))
        _used["HiCacheStore"] += 1

    def set(self, key: str, value: Any = None, *others: Any) -> bool:
        return super().set(key, self._longer(value), *others)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        longer = self._longer(target_location)
        if super().get(key, longer, target_sizes) is None:
            return None
        return target_location.copy_(longer[: len(target_location)])

    def _longer(self, page: torch.Tensor) -> torch.Tensor:
        """The page as it is stored; from now on the pool has pages of this size."""
        longer = page.repeat(LONGER)
        self.register_mem_pool_host(
            SimpleNamespace(get_dummy_flat_data_page=lambda: longer, dtype=page.dtype, page_size=1)
        )
        return longer


def theirs() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def ours() -> contextlib.AbstractContextManager[None]:
    return named(_modules, HiCacheFile=_File)


@contextlib.contextmanager
def prepared(paths: Sequence[Path]) -> Iterator[tuple[list[ModuleType], Counter[str]]]:
    sys.modules.setdefault("datasets", MagicMock())  # SGLang's tools for tests import it
    _modules[:] = map(load, paths)
    yield _modules, _used
