"""The shipped cache suite on our NumPy backend, used exactly as a third party uses it."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvcache.testing
import ml
from kvcache.testing import CacheTests
from kvcache.testing.rigs.protocol import Plan, only_protocol
from ml.backend_spec import COMPUTE_OPERATIONS


class TestNumpy(CacheTests):
    backend_name = "numpy"
    colours = (0,)  # the strict backend, PyTorch and MLX have the other three of each table of parameters
    traces = 160
    state_traces = 32
    quantized_traces = 40
    encoder_traces = 32
    fault_stride = 2


class StoringOnly(Plan):
    """Lets everything pass but computation."""

    def run(self, name: str, call: Callable[[], Any]) -> Any:
        if name in COMPUTE_OPERATIONS:
            raise ml.NotSupportedError(f"{name}: this backend only stores")
        return super().run(name, call)


class TestStorageOnly(CacheTests):
    """A backend that declares compute absent runs all of the suite that needs none."""

    features = ml.Features(absent=frozenset({"compute"}))
    colours = (0,)
    traces = 24
    state_traces = 4
    encoder_traces = 4
    fault_stride = 9
    long_run = 500

    @pytest.fixture
    def backend(self) -> Iterator[ml.Backend]:
        with ml.open_backend("numpy") as backend:
            yield only_protocol(backend, StoringOnly())


AREAS = [base for base in CacheTests.__mro__ if base.__module__.startswith("kvcache.testing.")]


def test_no_test_of_one_area_hides_one_of_another() -> None:
    names = Counter(name for area in AREAS for name in vars(area) if name.startswith("test_"))
    assert [name for name, count in names.items() if count > 1] == []
    assert sum(names.values()) > 60


def test_every_area_of_the_suite_belongs_to_the_whole() -> None:
    for file in Path(inspect.getfile(kvcache.testing)).parent.glob("**/*.py"):
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith("class ") and "Tests(CacheCase)" in line:
                assert any(area.__name__ in line for area in AREAS), f"{file.name}: {line}"
