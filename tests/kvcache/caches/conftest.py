"""Each test runs on NumPy; one in eight runs on each of the other backends, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from zlib import crc32

import pytest

import ml
from kvcache.testing.models.attention import Setup
from kvcache.testing.rigs.encoder import EncoderRig
from kvcache.testing.rigs.snapshots import CopyRig
from kvcache.testing.rigs.states import StateRig, StateSetup
from ml.testing.strict import strict

OTHERS = ("torch", "mlx", "cupy", "strict")
SHARE = 8


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend_name" in metafunc.fixturenames:
        number = crc32(metafunc.function.__name__.encode()) % SHARE
        metafunc.parametrize("backend_name", ["numpy", *OTHERS[number : number + 1]], scope="module")


@pytest.fixture(scope="module")
def backend(backend_name: str) -> Iterator[ml.Backend]:
    """An open backend; CuPy's is on a double of CuPy, the strict one on NumPy."""
    if backend_name == "cupy":
        from ...rigs.cupy_double import module

        with module.CupyBackend() as opened:
            yield opened
        return
    if backend_name == "strict":
        with strict(ml.open_backend("numpy")) as opened:
            yield opened
        return
    pytest.importorskip(backend_name)
    with ml.open_backend(backend_name) as opened:
        yield opened


@pytest.fixture
def ctx(backend: ml.Backend) -> Iterator[ml.Context]:
    with backend.new_context() as context:
        yield context


@pytest.fixture
def rig(backend: ml.Backend, ctx: ml.Context) -> Callable[..., CopyRig]:
    """``rig(setup=Setup(), **changes)``: a cache and its model, side by side, and snapshots of both."""

    def make(setup: Setup | None = None, **changes: Any) -> CopyRig:
        return CopyRig(replace(setup or Setup(), **changes), backend, ctx)

    return make


@pytest.fixture
def states(backend: ml.Backend, ctx: ml.Context) -> Callable[..., StateRig]:
    """``states(**changes)``: a recurrent cache and its model, side by side."""
    return lambda **changes: StateRig(replace(StateSetup(), **changes), backend, ctx)


@pytest.fixture
def encoders(backend: ml.Backend, ctx: ml.Context) -> Callable[..., EncoderRig]:
    """``encoders(dtype, config, max_sequences)``: an encoder cache and a dict, side by side."""
    return lambda *args, **named: EncoderRig(backend, ctx, *args, **named)
