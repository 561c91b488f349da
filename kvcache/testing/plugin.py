"""The pytest11 plugin: readable assertions in the shipped suite. The options are ml.testing's."""

from __future__ import annotations

import pytest

__all__: list[str] = []

_SUITE = (
    "attending", "batches", "cache", "capacity", "defrag", "faults", "harness", "masks", "model", "order",
    "properties", "protocol", "removal", "reserving", "rig", "sharing", "stateful", "storing", "traces",
    "values", "windows",
)  # fmt: skip
pytest.register_assert_rewrite(*(f"kvcache.testing.{name}" for name in _SUITE))
