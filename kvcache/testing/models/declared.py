"""What a backend declares absent, of what caches store."""

from __future__ import annotations

import pytest

import kvcache
import ml
from kvcache.storage.formats import CacheFormat


def skip_undeclared(backend: ml.Backend, *stored: kvcache.CacheDType) -> None:
    """Skip where one of these is stored in a dtype that is declared absent; a wrapper's is what it wraps."""
    features = getattr(getattr(backend, "_inner", backend), "features", None) or ml.Features()
    for one in map(CacheFormat.of, stored):
        for dtype in ml.DType:
            if dtype in one.dtypes - features.dtypes:
                pytest.skip(f"declared absent: {dtype.name}, which {one} stores")
