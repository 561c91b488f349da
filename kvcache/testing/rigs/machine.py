"""What random traces drive: a cache beside its projection of the dictionary, call by call."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import ml

Op = tuple[object, ...]
"""A call: its name and arguments, which stay valid if calls before it are left out."""


class Machine(Protocol):
    """A cache and its model; each call is checked against the model."""

    def choose(self, rnd: random.Random) -> Op:
        """The next call, chosen from the model's content."""

    def apply(self, op: Op) -> None:
        """Make a call; raises if the cache and its model differ. A call without an object does nothing."""

    def finish(self) -> None:
        """Read back everything that is stored, and every snapshot."""


@dataclass(frozen=True)
class Trace:
    """A cache with the parameters ``setup`` and the number of calls on it."""

    setup: object
    calls: int
    machine: Callable[[ml.Backend, ml.Context], Machine]
