"""A FileStore in a folder of its own, and the names that lie there: fixtures and helpers of its tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcache.stores import (
    FileStore,
)

posix = pytest.mark.skipif(os.name != "posix", reason="FileStore needs a POSIX system")


@pytest.fixture
def where(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(where: Path) -> Iterator[FileStore]:
    with FileStore(where, durable=False) as store:
        yield store


def names(where: Path) -> list[str]:
    """Of the files of entries, and of those that are being written."""
    return sorted(path.name for folder in ("pages", "writing") for path in (where / folder).iterdir())


def both(*keys: str) -> list[str]:
    return sorted(key + suffix for key in keys for suffix in (".json", ".safetensors"))
