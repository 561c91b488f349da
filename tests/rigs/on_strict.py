"""A plugin of pytest, ``-p tests.rigs.on_strict``: tests that open NumPy get the strict backend over it.

The shipped suites on the strict backend run whole then, not a sample of them.
"""

from __future__ import annotations

import pytest

from backends.numpy import plugin
from ml.testing.strict import strict

_open_numpy = plugin.open_numpy
plugin.open_numpy = lambda *args, **options: strict(_open_numpy(*args, **options))
SAMPLED = (
    "colours",
    "case_stride",
    "traces",
    "state_traces",
    "encoder_traces",
    "quantized_traces",
    "fault_stride",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for cls in {item.cls for item in items if isinstance(item, pytest.Function) and item.cls is not None}:
        for name in SAMPLED:
            if name in vars(cls):
                delattr(cls, name)
