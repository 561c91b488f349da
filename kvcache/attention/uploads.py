"""What passes upload together, and how a pass was read, which tells what the next one will upload."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

import ml
from kvcache.storage.device_copies import HostArrays

Packers = Mapping[str, Callable[[ml.RaggedPlan], tuple[Any, np.ndarray]]]


@dataclass(slots=True)
class Reads:
    """How a pass was read: the next, likely read so too, is planned before its first indices are uploaded."""

    shared: bool = False
    rows: bool = False
    levels: bool = False
    worth: int | None = None
    """What levels or a plan were asked for with; None: neither was."""
    packers: Packers | None = None
    """What a backend's kernel uploads of a plan; None: no plan was asked for."""

    def __bool__(self) -> bool:
        return self.shared or self.rows or self.worth is not None


class _Pass(Protocol):
    """A ForwardPass, as far as uploads know it."""

    expected: Reads | None

    def reads(self) -> Reads | None: ...
    def foresee(self, reads: Reads | None) -> None: ...


class Uploads(HostArrays):
    """What the host makes for a pass, or for those of several caches that start together: one transfer.

    Before it goes, each of the passes plans what it will be read for: as the pass before was, or, where there
    was none, as one of the others is.
    """

    __slots__ = ("_passes",)

    def __init__(self) -> None:
        super().__init__()
        self._passes: list[weakref.ref[_Pass]] = []

    def serve(self, forward: _Pass) -> None:
        self._passes.append(weakref.ref(forward))

    def gather(self) -> None:
        passes = [forward for ref in self._passes if (forward := ref()) is not None]
        beside = next((reads for forward in passes if (reads := forward.reads())), None)
        for forward in passes:
            forward.foresee(beside if forward.expected is None else forward.expected)
