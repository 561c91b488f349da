"""The data passed between the scheduler's side and the workers': the same for all ranks.

A page is identified by ``keys[0]``, its key on rank 0; rank r reads and writes ``keys[r]``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["PageLoad", "PageSave", "Report", "Step"]


@dataclass(frozen=True, slots=True)
class PageLoad:
    """A page to load into vLLM's blocks: ``blocks[i]`` receives its i-th block; None: already present."""

    keys: tuple[str, ...]
    begin: int
    """The position of its first token."""
    blocks: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class PageSave:
    """A page that is complete when the step's pass ends, and its blocks."""

    keys: tuple[str, ...]
    begin: int
    blocks: tuple[int, ...]


@dataclass(slots=True)
class Step:
    """The workers' tasks in one step of the engine."""

    loads: Mapping[str, Sequence[PageLoad]] = field(default_factory=dict)
    """By request; each is answered once, whatever the result."""
    saves: Sequence[PageSave] = ()
    idle: bool = False
    """Nothing is computed in this step, so loads may take the time."""


@dataclass(slots=True)
class Report:
    """The results for pages and requests since the last step."""

    stored: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    """Pages that no store accepted."""
    postponed: set[str] = field(default_factory=set)
    """Pages that were not copied, for lack of room in host memory."""
    broken: set[str] = field(default_factory=set)
    """Requests with a page that could not be loaded."""

    def __bool__(self) -> bool:
        return bool(self.stored or self.failed or self.postponed or self.broken)

    def joined(self, other: Report) -> Report:
        """The combined report of two ranks."""
        return Report(
            self.stored | other.stored,
            self.failed | other.failed,
            self.postponed | other.postponed,
            self.broken | other.broken,
        )
