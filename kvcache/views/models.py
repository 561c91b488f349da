"""Pictures as plain data: what a cache or a PrefixCache held at one moment.

A picture holds no tensor and no reference to the cache: it may be kept, compared, sent as JSON. Everything
that draws (text, terminal, SVG, HTML, plots) works on these alone.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kvcache.cache import InvalidRangeError

__all__ = [
    "CachePicture", "CellMap", "CellRun", "EncoderEntry", "EncoderView", "Kind", "MaskPicture", "NodeView",
    "OtherView", "Part", "Picture", "PrefixPicture", "SequenceView", "SessionView", "StateView", "StatesView",
    "TierView",
]  # fmt: skip

Kind = Literal["free", "kept", "shared", "own"]


class Picture:
    """What all pictures can do. ``print(picture)`` draws it as text, a notebook as HTML, rich in colours."""

    def text(self, width: int = 80) -> str:
        """Plain text of at most ``width`` columns, with no escape codes."""
        from kvcache.views.text import draw, plain

        return plain(draw(self, width))

    def ansi(self, width: int = 80) -> str:
        """The same with colours, for a terminal."""
        from kvcache.views.text import ansi, draw

        return ansi(draw(self, width))

    def svg(self) -> str:
        """The drawing alone, as an SVG document."""
        from kvcache.views.svg import document

        return document(self)

    def html(self, title: str = "") -> str:
        """A page that needs nothing but itself: drawings as inline SVG, tables, no script."""
        from kvcache.views.html import page

        return page(self, title)

    def record(self) -> dict[str, Any]:
        """All of it as dicts, lists, numbers and strings."""
        return {"picture": type(self).__name__, **_fields(self)}

    def json(self) -> str:
        return json.dumps(self.record(), ensure_ascii=False)

    def save(self, path: str | Path) -> Path:
        """Write it as the ending of ``path`` says: .html, .svg, .json, .txt; InvalidRangeError for others."""
        path = Path(path)
        makers = {".html": self.html, ".svg": self.svg, ".json": self.json, ".txt": self.text}
        maker = makers.get(path.suffix.lower())
        if maker is None:
            raise InvalidRangeError(f"save: {path}; a picture ends in {', '.join(makers)}")
        path.write_text(maker(), encoding="utf-8")
        return path

    def __str__(self) -> str:
        return self.text()

    def __rich__(self) -> Any:
        from kvcache.views.terminal import renderable

        return renderable(self)

    def _repr_html_(self) -> str:
        from kvcache.views.html import fragment

        return fragment(self)


# The cells of a cache.


@dataclass(frozen=True, slots=True)
class CellRun:
    """Neighbouring cells ``[begin, end)`` that the same sequences and as many snapshots hold."""

    begin: int
    end: int
    sequences: tuple[int, ...]
    """Those that hold them, ascending."""
    snapshots: int
    """How many snapshots that have copied nothing hold each of them."""
    position: int | None
    """Of the first cell in its sequences; the others count up. None where no sequence holds them."""

    @property
    def size(self) -> int:
        return self.end - self.begin

    @property
    def kind(self) -> Kind:
        """ "own" (of one sequence), "shared" (of several), "kept" (by snapshots alone), or "free"."""
        if not self.sequences:
            return "kept" if self.snapshots else "free"
        return "own" if len(self.sequences) == 1 else "shared"


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One sequence: ``tokens`` cells at positions from ``first`` to ``last``, in ``runs`` runs of cells."""

    seq: int
    tokens: int
    first: int
    last: int
    shared: int
    """How many of its cells another sequence holds too."""
    visible: int
    """How many of them its next token attends to: fewer than all with a window or chunks."""
    runs: int
    lost: bool = False


@dataclass(frozen=True)
class CellMap:
    """All cells of an attention cache, from the first to the last."""

    name: str
    note: str
    """What bounds it: its window or chunk, "" where nothing does."""
    cells: int
    nbytes: int
    sequences: tuple[SequenceView, ...]
    runs: tuple[CellRun, ...]

    def count(self, kind: Kind) -> int:
        """How many cells are of a kind."""
        return sum(run.size for run in self.runs if run.kind == kind)

    @property
    def used(self) -> int:
        """Cells that a sequence or a snapshot holds."""
        return self.cells - self.count("free")

    @cached_property
    def holes(self) -> tuple[CellRun, ...]:
        """Runs of free cells with used ones behind them."""
        used = [i for i, run in enumerate(self.runs) if run.kind != "free"]
        return tuple(run for run in self.runs[: used[-1] if used else 0] if run.kind == "free")

    @cached_property
    def codes(self) -> np.ndarray:
        """A code for every cell: 0 free, 1 kept by snapshots alone, 2 shared, 3 + seq of one sequence."""
        return np.repeat(self.run_codes, [run.size for run in self.runs])

    @cached_property
    def run_codes(self) -> np.ndarray:
        """The code of each run."""
        return np.array([_code(run) for run in self.runs], dtype=np.int64)


def _code(run: CellRun) -> int:
    if run.kind == "own":
        return 3 + run.sequences[0]
    return {"free": 0, "kept": 1, "shared": 2}[run.kind]


@dataclass(frozen=True, slots=True)
class StateView:
    """The recurrent state of one sequence: that of ``tokens`` tokens, and checkpoints to go back to."""

    seq: int
    tokens: int
    slot: int | None
    """Where it lies; None for one that the next pass loads."""
    checkpoints: tuple[int, ...]
    lost: bool = False


@dataclass(frozen=True, slots=True)
class StatesView:
    """The recurrent states of a cache: ``slots`` places, and the checkpoints' copies."""

    name: str
    slots: int
    nbytes: int
    rows: tuple[StateView, ...]


@dataclass(frozen=True, slots=True)
class EncoderEntry:
    """An encoder's output: ``length`` rows in each layer, which came with the token at ``position``."""

    sequences: tuple[int, ...]
    """Those that share it."""
    position: int
    length: int
    layers: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class EncoderView:
    name: str
    nbytes: int
    rows: tuple[EncoderEntry, ...]


@dataclass(frozen=True, slots=True)
class OtherView:
    """A cache of another package, of which no more is known."""

    name: str
    nbytes: int


Part = CellMap | StatesView | EncoderView | OtherView


@dataclass(frozen=True)
class CachePicture(Picture):
    """A cache: one part for each table of cells, set of states, or encoder's outputs in it."""

    name: str
    nbytes: int
    parts: tuple[Part, ...]

    @property
    def maps(self) -> tuple[CellMap, ...]:
        return tuple(part for part in self.parts if isinstance(part, CellMap))


# A PrefixCache.


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node of the radix tree: the edge ``[begin, end)``, and what is kept of it."""

    parent: int | None
    """Index of its parent in ``PrefixPicture.nodes``; None below the root."""
    depth: int
    begin: int
    end: int
    text: str
    """How its tokens begin."""
    tiers: tuple[str, ...]
    """Where its snapshot lies, the nearest first: "cache" (in its cells) or "device" (copied out), "host",
    "writing" (on its way to a store), "store"."""
    nbytes: int
    """Of the nearest; 0 where only a store has it, or nothing does."""
    pins: int = 0
    age: float = 0.0
    """Seconds since it was made."""
    idle: int = 0
    """How many prefixes that are kept were used since this one was."""
    next_out: bool = False
    """Whether it is the first to leave the device."""
    hidden: int = 0
    """Nodes below it that the picture leaves out."""

    @property
    def tokens(self) -> int:
        return self.end - self.begin

    @property
    def tier(self) -> str:
        """The nearest one, or "none"."""
        return self.tiers[0] if self.tiers else "none"


@dataclass(frozen=True, slots=True)
class SessionView:
    """An open session: ``evaluated`` of its ``tokens`` are in the cache, ``cached`` of them from before."""

    seq: int
    tokens: int
    cached: int
    evaluated: int
    text: str


@dataclass(frozen=True, slots=True)
class TierView:
    """A tier: ``entries`` snapshots of ``nbytes`` in all, against its budget; None: not known."""

    name: str
    nbytes: int | None
    budget: int | None
    entries: int | None
    note: str = ""


@dataclass(frozen=True)
class PrefixPicture(Picture):
    """A PrefixCache: its tree (the most recently used nodes, parents before children), tiers and sessions."""

    nodes: tuple[NodeView, ...]
    total: int
    """Nodes of the radix tree, those that are left out too."""
    hidden: int
    """Nodes left out whose parent is the root, and those below them."""
    tiers: tuple[TierView, ...]
    sessions: tuple[SessionView, ...]
    tokens: int
    """Tokens of all prompts so far."""
    reused: int
    """How many of them were found."""
    evicted: int
    cache: CachePicture

    def children(self) -> dict[int | None, list[int]]:
        """Indices of the shown nodes right below each one; None: below the root."""
        found: dict[int | None, list[int]] = {}
        for i, node in enumerate(self.nodes):
            found.setdefault(node.parent, []).append(i)
        return found


# A mask.


@dataclass(frozen=True, eq=False)
class MaskPicture(Picture):
    """Who sees what in one pass: ``seen[i, j]``, whether token i of the batch attends to cell j."""

    name: str
    seen: np.ndarray
    """(tokens, history) of bool, in the order of ``get``; no padded rows."""
    queries: tuple[tuple[int, int], ...]
    """(sequence, position) of each row."""
    cells: np.ndarray
    """The cell of each column."""


def _fields(view: Any) -> dict[str, Any]:
    """A dataclass as a dict of JSON-able values."""
    return {field.name: _plain(getattr(view, field.name)) for field in dataclasses.fields(view)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _fields(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
