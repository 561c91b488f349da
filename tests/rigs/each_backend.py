"""Fixtures of a file that runs on several backends: ``ctx = each_context("numpy", "torch")``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import ml


def runnable(*names: str) -> list[str]:
    """Those of them that can run here, best first."""
    return [info.name for info in ml.available_backends() if info.available and info.name in names]


def need_backend(name: str) -> None:
    """Skip the test where the backend cannot run."""
    info = next(info for info in ml.available_backends() if info.name == name)
    if not info.available:
        pytest.skip(f"{name} cannot run here: {info.reason}")


def each_backend(*names: str) -> Any:
    @pytest.fixture(scope="module", params=runnable(*names))
    def backend(request: pytest.FixtureRequest) -> Iterator[ml.Backend]:
        with ml.open_backend(request.param) as opened:
            yield opened

    return backend


def each_context(*names: str) -> Any:
    @pytest.fixture(scope="module", params=runnable(*names))
    def ctx(request: pytest.FixtureRequest) -> Iterator[ml.Context]:
        with ml.open_backend(request.param) as backend, backend.new_context() as context:
            yield context

    return ctx


def host_and_tensors(on_host: Any, by_tensors: Callable[[ml.Backend], Any]) -> Any:
    """The body on the host, and the one that is written on Tensors on each backend."""

    @pytest.fixture(scope="module", params=["host", *runnable("numpy", "torch", "mlx")])
    def body(request: pytest.FixtureRequest) -> Iterator[Any]:
        if request.param == "host":
            yield on_host
            return
        with ml.open_backend(request.param, device="cpu") as backend:
            yield by_tensors(backend)

    return body


def opener(make: Callable[[], ml.Backend]) -> Any:
    """The fixture ``open_backend`` of the suites, by ``make``: all are closed after the test."""

    @pytest.fixture
    def open_backend(self: Any) -> Iterator[Callable[[], ml.Backend]]:
        with ExitStack() as stack:
            yield lambda: stack.enter_context(make())

    return open_backend
