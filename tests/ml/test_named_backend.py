"""A backend of the required names alone serves caches and prefixes, whatever its contexts tell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import ml
from kvcache.testing.traces import run_traces
from ml.testing import strict

from ..kvcache.prefix.test_conversations import run_machine


@pytest.fixture(name="named")
def _named(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Its contexts do not tell their backend, so that nothing beyond the required core can be asked for."""
    monkeypatch.delattr(strict._ContextRules, "backend")
    with strict.strict(ml.open_backend("numpy")) as backend:
        yield backend


def test_a_backend_of_the_required_names_is_a_backend_and_its_context_need_not_name_it(named: Any) -> None:
    assert isinstance(named, ml.Backend)
    assert isinstance(named.new_context().zeros((1,), ml.DType.F32), ml.Tensor)
    assert not hasattr(named.new_context(), "backend")


@pytest.mark.parametrize(
    ("cache", "traces"), [("attention", 30), ("quantized", 6), ("recurrent", 8), ("wrapper", 8)]
)
def test_caches_agree_with_their_models(named: Any, cache: str, traces: int) -> None:
    assert run_traces(named, range(traces), cache=cache, most=1) == []


@pytest.mark.parametrize("cache", ["causal", "recurrent and sliding"])
def test_conversations_see_what_was_said(named: Any, cache: str) -> None:
    run_machine(named, 2, cache=cache)
