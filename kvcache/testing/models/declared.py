"""Skips tests of dtypes that a backend declares absent."""

from __future__ import annotations

import pytest

import kvcache
import ml
from kvcache.storage.formats import CacheFormat


def skip_undeclared(backend: ml.Backend, *stored: kvcache.CacheDType) -> None:
    """Skip the test if one of these formats is stored in a dtype declared absent."""
    features = getattr(getattr(backend, "_inner", backend), "features", None) or ml.Features()
    for one in map(CacheFormat.of, stored):
        for dtype in ml.DType:
            if dtype in one.dtypes - features.dtypes:
                pytest.skip(f"declared absent: {dtype.name}, which {one} stores")
