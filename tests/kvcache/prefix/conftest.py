"""Rigs of the prefix cache, on NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import ml
from ml.testing.strict import strict

from ...rigs.cupy_double import module as cupy
from .rigs.conversing import ConversationSetup, Rig, Talk
from .rigs.stores import Way


@pytest.fixture
def ctx(backend: ml.Backend) -> Iterator[ml.Context]:
    with backend.new_context() as ctx:
        yield ctx


@pytest.fixture
def strict_backend() -> Iterator[ml.Backend]:
    with strict(ml.open_backend("numpy")) as backend:
        yield backend


@pytest.fixture(params=["torch", "mlx", "the double of CuPy"])
def other(request: pytest.FixtureRequest, open_any: Any) -> Iterator[ml.Backend]:
    """Other backends, for a sample of what runs whole on NumPy."""
    double = request.param == "the double of CuPy"
    with cupy.CupyBackend() if double else open_any(request.param) as backend:
        yield backend


@pytest.fixture
def talk(backend: ml.Backend) -> Iterator[Talk]:
    """``talk(cache="causal", budget, tiers, **changes of the setup or options)``: a rig."""
    made: list[Rig] = []

    def make(cache: str = "causal", budget: int | None = None, tiers: Any = (), **changes: Any) -> Rig:
        names = ("salt", "identity", "backlog", "in_flight", "break_even", "read_ahead")
        options = {name: changes.pop(name) for name in names if name in changes}
        rig = Rig(replace(ConversationSetup(cache), **changes), backend, budget, tiers, **options)
        made.append(rig)
        return rig

    yield make
    for rig in made:  # what a test leaves open is no loss; closing it could wait for a gate that is shut
        if rig.prefix._finalizer is not None:
            rig.prefix._finalizer.detach()


@pytest.fixture
def way() -> Iterator[Way]:
    found = Way()
    yield found
    found.gate.set()
