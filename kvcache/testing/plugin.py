"""The pytest11 plugin: readable assertions in the shipped suite. The options are ml.testing's."""

from __future__ import annotations

import pytest

__all__: list[str] = []

_SUITE = (
    "attending", "batches", "cache", "capacity", "conversing", "defrag", "encoder", "failing", "family", "faults",
    "harness", "masks", "model", "order", "prefix", "prefix_traces", "properties", "protocol", "quantized", "recurrent", "removal",
    "reserving", "rig", "sharing", "snapshots", "stateful", "states", "stores", "storing", "traces", "values",
    "windows", "wrapper", "branches", "branching",
)  # fmt: skip
pytest.register_assert_rewrite(*(f"kvcache.testing.{name}" for name in _SUITE))
