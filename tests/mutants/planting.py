"""What a mutant is, and the list of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ml.testing.harness import BackendCase

__all__ = ["MUTANTS", "Mutant", "mutant", "override"]

Break = Callable[[ModuleType], None]


@dataclass(frozen=True)
class Mutant:
    """A bug, and the area of the suite that has to catch it."""

    name: str
    area: type[BackendCase]
    plant: Break


MUTANTS: list[Mutant] = []


def mutant(area: type[BackendCase]) -> Callable[[Break], Break]:
    def register(plant: Break) -> Break:
        MUTANTS.append(Mutant(plant.__name__, area, plant))
        return plant

    return register


def override(owner: Any, name: str) -> Callable[[Any], Any]:
    """Replace a method; the replacement is given the original as its first argument."""
    original = getattr(owner, name)

    def replace(function: Any) -> Any:
        setattr(owner, name, lambda *args, **kwargs: function(original, *args, **kwargs))
        return function

    return replace
