"""SGLang's tests of its storage of pages in files, with ours in the place of HiCacheFile.

They store pages of some bytes under a key, without a pool of SGLang's: a pool of pages of that size stands
in. A budget of theirs counts the bytes of pages, ours those of whole entries.
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

sys.modules.setdefault(
    "datasets", MagicMock()
)  # what their tools for tests import, and these tests do not use

import tests.integrations.sglang.running.no_pictures  # noqa: F401  before SGLang is imported
from benchmarks.peers_tests import load, named
from kvcache.integrations.sglang import HiCacheStore

EVICTOR = "looks into the evictor or the names of HiCacheFile's files"
NAMES = "is of HiCacheFile's cache of file names"
LEFT_OUT = {
    "test_*_default_is_*": "is of HiCacheFile's settings in the environment",
    **dict.fromkeys(("test_scan_*", "test_*cp_*", "test_*mla_*", "test_*_external_file"), EVICTOR),
    **dict.fromkeys(("test_*_min_free", "test_pre_reservation_*", "test_eviction_ratio_*"), EVICTOR),
    **dict.fromkeys(("test_metadata_*", "test_*_metadata_cache", "test_*_populates_cache"), NAMES),
    **dict.fromkeys(("test_disabled_by_default", "test_batch_exists_bypass_*"), NAMES),
}
"""Patterns of tests that are not run, and why."""

_used: Counter[str] = Counter()
_modules: list[ModuleType] = []


class _File(HiCacheStore):  # type: ignore[misc]
    """A FileStore in the folder that HiCacheFile would write to."""

    def __init__(self, config: Any, file_path: str) -> None:
        size = (config.extra_config or {}).get("max_size")
        url = f"file://{file_path}?durable=no" + (f"&budget={size}" if size else "")
        options = {"store": url, "identity": {"model": config.model_name}}
        super().__init__(SimpleNamespace(**{**vars(config), "extra_config": options}))
        _used["HiCacheStore"] += 1

    def set(self, key: str, value: Any = None, *others: Any) -> bool:
        self._holds(value)
        return super().set(key, value, *others)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        self._holds(target_location)
        return super().get(key, target_location, target_sizes)

    def _holds(self, page: torch.Tensor) -> None:
        """From now on the pool has pages like this one."""
        self.register_mem_pool_host(
            SimpleNamespace(get_dummy_flat_data_page=lambda: page, dtype=page.dtype, page_size=1)
        )


def theirs() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def ours() -> contextlib.AbstractContextManager[None]:
    return named(_modules, HiCacheFile=_File)


@contextlib.contextmanager
def prepared(paths: Sequence[Path]) -> Iterator[tuple[list[ModuleType], Counter[str]]]:
    _modules[:] = map(load, paths)
    yield _modules, _used
