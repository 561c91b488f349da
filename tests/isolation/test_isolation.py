"""What one context computed is found in that context and in no other: every face, tier and dimension.

A cell is one dimension of one face on one tier: the prompt in each context in which that dimension is other,
alone and together with each other dimension, finds nothing of any other context; and in the same context it
finds all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from . import faces, runtimes
from .contexts import TIERS, Walk, walk

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of what PEFT asks
FACES = [
    faces.OfPrefixCache, faces.OfEngine, runtimes.OfHF, runtimes.OfMLX, faces.OfVLLM, faces.OfSGLang,
    faces.OfLMCache,
]  # fmt: skip
CELLS = [
    pytest.param(made, tier, dimension, id=f"{made.face.name}-{tier}-{dimension}")
    for made in FACES
    for tier in TIERS
    for dimension in made.face.dimensions(tier)
]


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any, str], Walk]:
    """The walk over all contexts of a face on a tier, made once."""
    known: dict[tuple[Any, str], Walk] = {}

    def made(face: Any, tier: str) -> Walk:
        if (face, tier) not in known:
            asked = face(tier, tmp_path_factory.mktemp("face"))
            known[face, tier] = walk(asked.ask, face.face.dimensions(tier))
            asked.close()
        return known[face, tier]

    return made


@pytest.mark.parametrize(("face", "tier", "dimension"), CELLS)
def test_what_is_other_is_kept_apart(face: Any, tier: str, dimension: str, walked: Any) -> None:
    found = walked(face, tier)
    assert not found.leaks(dimension)
    assert not found.lost(dimension)
