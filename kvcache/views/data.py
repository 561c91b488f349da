"""What pictures hold, as plain data: a cache, a prefix cache, a mask, a store or a page at one moment.

No tensor and no reference to what was looked at: it may be kept, compared, sent as JSON. Everything that
draws (text, terminal, SVG, HTML, plots) works on this alone; ``pictures.py`` has the classes that users hold.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

__all__ = [
    "CacheData", "CellMap", "CellRun", "EncoderEntry", "EncoderView", "EntryView", "Kind", "MaskData",
    "NodeView", "OtherView", "PageData", "PagePart", "Part", "PictureData", "PrefixData", "SequenceView",
    "SessionView", "StateView", "StatesView", "StoreData", "TierView",
]  # fmt: skip

Kind = Literal["free", "kept", "shared", "own"]


class PictureData:
    """What every picture holds; the base that drawings take."""

    def record(self) -> dict[str, Any]:
        """All of it as dicts, lists, numbers and strings."""
        return {"picture": type(self).__name__, **_fields(self)}


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
class CacheData(PictureData):
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
    """Index of its parent in ``PrefixData.nodes``; None below the root."""
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
class PrefixData(PictureData):
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
    cache: CacheData

    def children(self) -> dict[int | None, list[int]]:
        """Indices of the shown nodes right below each one; None: below the root."""
        found: dict[int | None, list[int]] = {}
        for i, node in enumerate(self.nodes):
            found.setdefault(node.parent, []).append(i)
        return found


# A mask.


@dataclass(frozen=True, eq=False)
class MaskData(PictureData):
    """Who sees what in one pass: ``seen[i, j]``, whether token i of the batch attends to cell j."""

    name: str
    seen: np.ndarray
    """(tokens, history) of bool, in the order of ``get``; no padded rows."""
    queries: tuple[tuple[int, int], ...]
    """(sequence, position) of each row."""
    cells: np.ndarray
    """The cell of each column."""


# What lies on disk.


@dataclass(frozen=True, slots=True)
class PagePart:
    """One cache's share of a page: K and V of ``tokens`` positions in ``layers`` layers, or states."""

    kind: str
    tokens: int
    layers: int
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class PageData(PictureData):
    """A snapshot in a file, in the layout of ``kvcache.stores.SerializedSnapshot``."""

    name: str
    nbytes: int
    begin: int
    end: int
    parts: tuple[PagePart, ...]
    tokens: int | None
    """How many token ids the file holds too; None: none."""
    facts: tuple[tuple[str, str], ...]
    """How its tokens begin, and what else its meta says."""


@dataclass(frozen=True, slots=True)
class EntryView:
    """An entry of a store; ``problem`` says why it cannot be read, "" where it can.

    ``note`` says what was not looked at, "" where all was.
    """

    key: str
    nbytes: int
    age: float
    """Seconds since it was last used."""
    begin: int = 0
    end: int = 0
    kind: str = ""
    problem: str = ""
    note: str = ""


@dataclass(frozen=True)
class StoreData(PictureData):
    """The folder of a FileStore: the entries that were used last, and totals of all."""

    name: str
    total: int
    nbytes: int
    budget: int | None
    entries: tuple[EntryView, ...]
    writing: int
    """Temporary files: of writers at work, or of ones that died."""


def _fields(view: Any) -> dict[str, Any]:
    """A dataclass as a dict of JSON-able values."""
    return {field.name: _plain(getattr(view, field.name)) for field in dataclasses.fields(view)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _fields(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
