"""What passes between the scheduler's side and the workers': plain data, the same for all ranks.

A page is known by ``keys[0]``, its key on rank 0; rank r reads and writes ``keys[r]``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["PageLoad", "PageSave", "Report", "Step"]


@dataclass(frozen=True, slots=True)
class PageLoad:
    """A page that goes to vLLM's blocks: ``blocks[i]`` takes its i-th block; None: it is there already."""

    keys: tuple[str, ...]
    begin: int
    """The position of its first token."""
    blocks: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class PageSave:
    """A page that is computed when the step's pass ends, and where it lies then."""

    keys: tuple[str, ...]
    begin: int
    blocks: tuple[int, ...]


@dataclass(slots=True)
class Step:
    """What the workers are to do in one step of the engine."""

    loads: Mapping[str, Sequence[PageLoad]] = field(default_factory=dict)
    """By request; each is answered once, whatever comes of it."""
    saves: Sequence[PageSave] = ()
    idle: bool = False
    """Nothing is computed in it: whoever loads may take the time."""


@dataclass(slots=True)
class Report:
    """What has become of pages and requests since the last step."""

    stored: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    """Pages that no store took."""
    postponed: set[str] = field(default_factory=set)
    """Pages for which there was no room in host memory; nothing was copied."""
    broken: set[str] = field(default_factory=set)
    """Requests of which a page could not be loaded."""

    def __bool__(self) -> bool:
        return bool(self.stored or self.failed or self.postponed or self.broken)

    def joined(self, other: Report) -> Report:
        """Of two ranks."""
        return Report(
            self.stored | other.stored,
            self.failed | other.failed,
            self.postponed | other.postponed,
            self.broken | other.broken,
        )
