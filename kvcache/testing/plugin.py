"""The pytest11 plugin: readable assertions in the shipped suite. The options are ml.testing's."""

from __future__ import annotations

import pytest

__all__: list[str] = []

_SUITE = (
    "attending", "batches", "branches", "branching", "cache", "capacity", "composed", "conversing",
    "copies", "defrag", "encoder", "endless", "failing", "family", "faults", "harness", "lazy", "masks",
    "model", "order", "prefix", "prefix_traces", "properties", "protocol", "quantized", "reading",
    "recurrent", "removal", "reserving", "rig", "scheduled", "sharing", "snapshots", "stateful", "states",
    "stores", "storing", "traces", "values", "windows", "wrapper",
)  # fmt: skip
pytest.register_assert_rewrite(*(f"kvcache.testing.{name}" for name in _SUITE))
