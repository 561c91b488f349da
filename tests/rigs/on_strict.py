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


LEFT_OUT = {
    "test_attend_quantized.py": "attention over codes is a capability",
    "test_direct_load.py": "reading into cells is a capability",
    "goes_in_one_step_with_its_last_state": "reading into cells is a capability",
    "test_what_was_put_into_cells": "reading into cells is a capability",
    "no_device_has_room_for_are_misses": "it replaces what NumPy allocates with",
    "test_an_id_that_is_too_large_and_a_tensor": "it quotes how NumPy's tensors show themselves",
    "test_threads.py": "a strict context belongs to one thread",
    "test_byte_limits.py": "the strict backend copies what it lends",
    "test_a_context_that_is_not_of_the_caches_backend": "a strict context does not tell that it is closed",
    "test_a_snapshot_on_another_backend": "the contract's tensors do not tell their backend",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name, reason in LEFT_OUT.items():
            if name in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=reason))
    for cls in {item.cls for item in items if isinstance(item, pytest.Function) and item.cls is not None}:
        for name in SAMPLED:
            if name in vars(cls):
                delattr(cls, name)
