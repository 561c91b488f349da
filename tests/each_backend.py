"""Fixtures of a file that runs on several backends: ``ctx = each_context("numpy", "torch")``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import ml

__all__ = ["each_backend", "each_context", "runnable"]


def runnable(*names: str) -> list[str]:
    """Those of them that can run here, best first."""
    return [info.name for info in ml.available_backends() if info.available and info.name in names]


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
