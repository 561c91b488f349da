"""LMCache's own remote and CPU backends over our stores: ``make test-lmcache``.

Without LMCache nothing is collected.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

HERE = importlib.util.find_spec("lmcache") is not None
collect_ignore_glob = [] if HERE else ["test_*.py"]
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path / 'store'}"
