"""The shipped cache suite on our NumPy backend, used exactly as a stranger uses it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import ml
from kvcache.testing import CacheTests
from kvcache.testing.rigs.protocol import Plan, only_protocol
from ml.capabilities import COMPUTE_OPERATIONS


class TestNumpy(CacheTests):
    backend_name = "numpy"
    traces = 1000
    state_traces = 100
    quantized_traces = 60
    encoder_traces = 100


class StoringOnly(Plan):
    """Lets everything pass but computation."""

    def run(self, name: str, call: Callable[[], Any]) -> Any:
        if name in COMPUTE_OPERATIONS:
            raise ml.NotSupportedError(f"{name}: this backend only stores")
        return super().run(name, call)


class TestStorageOnly(CacheTests):
    """A backend that declares compute absent runs all of the suite that needs none."""

    features = ml.Features(absent=frozenset({"compute"}))
    traces = 80
    state_traces = 16
    encoder_traces = 16
    fault_stride = 3
    long_run = 2000

    @pytest.fixture
    def backend(self) -> Iterator[ml.Backend]:
        with ml.open_backend("numpy") as backend:
            yield only_protocol(backend, StoringOnly())
