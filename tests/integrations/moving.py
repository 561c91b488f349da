"""Rows that are moved together far more often than they need to be."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache import CausalCache
from kvcache.integrations.rows import caches


def moves(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Give rows room for only two more tokens; returns what each move will have answered."""
    answers: list[bool] = []
    defrag = CausalCache.defrag

    def watched(cache: CausalCache, *given: Any) -> bool:
        answers.append(defrag(cache, *given))
        return answers[-1]

    monkeypatch.setattr(caches, "ROOM", 2)
    monkeypatch.setattr(CausalCache, "defrag", watched)
    return answers
