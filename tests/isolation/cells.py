"""Cells of the table, as tests of any file: a face, a tier and a dimension each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from .contexts import NAMES, TIERS, Walk, contexts, walk

__all__ = ["cells", "check_cell", "walks"]


def cells(made: Iterable[Any]) -> Any:
    """Parametrizes a test with ``face``, ``tier`` and ``dimension`` of these faces."""
    found = [
        pytest.param(one, tier, dimension, id=f"{one.face.name}-{tier}-{dimension}")
        for one in made
        for tier in (*TIERS, *NAMES)
        for dimension in one.face.dimensions(tier)
    ]
    return pytest.mark.parametrize(("face", "tier", "dimension"), found)


def walks() -> Any:
    """A fixture for ``check_cell``: the walk of a face on a tier, made once in a file."""

    @pytest.fixture(scope="module")
    def walked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any, str], Walk]:
        known: dict[tuple[Any, str], Walk] = {}

        def walk_of(face: Any, tier: str) -> Walk:
            if (face, tier) not in known:
                asked = face(tier, tmp_path_factory.mktemp("face"))
                known[face, tier] = walk(asked.ask, face.face.dimensions(tier))
                asked.close()
            return known[face, tier]

        return walk_of

    return walked


def check_cell(
    face: Any, tier: str, dimension: str, walked: Callable[[Any, str], Walk], record_property: Any
) -> None:
    found = walked(face, tier)
    assert not found.leaks(dimension)
    assert not found.lost(dimension)
    crossed = sum(dimension in context for context in contexts(face.face.dimensions(tier)))
    record_property("cell", [face.face.name, dimension, tier, crossed])
