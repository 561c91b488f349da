"""The building blocks of pictures for text, SVG and HTML: headings, tables, maps of cells, trees, masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from kvcache import StepReads

__all__ = [
    "Binned", "Block", "CellMap", "CellRun", "Facts", "Heading", "Kind", "MaskBlock", "NodeView",
    "SequenceView", "Table", "TierView", "Tiers", "Tree", "binned", "tabled", "thinned",
]  # fmt: skip

Kind = Literal["free", "kept", "shared", "own"]
LISTED = 64
"""The most rows of a table; the rest is counted."""


@dataclass(frozen=True, slots=True)
class CellRun:
    """Neighbouring cells ``[begin, end)`` held by the same sequences and equally many snapshots."""

    begin: int
    end: int
    sequences: tuple[int, ...]
    """Those that hold them, ascending."""
    snapshots: int
    """How many snapshots that were not copied out hold each of them."""
    position: int | None
    """The position of the first cell; the others follow. None if no sequence holds them."""

    @property
    def size(self) -> int:
        return self.end - self.begin

    @property
    def kind(self) -> Kind:
        """ "own" (of one sequence), "shared" (of several), "kept" (by snapshots alone), or "free"."""
        if not self.sequences:
            return "kept" if self.snapshots else "free"
        return "own" if len(self.sequences) == 1 else "shared"

    @property
    def code(self) -> int:
        """0 free, 1 kept by snapshots alone, 2 shared, 3 + seq of one sequence."""
        if self.kind == "own":
            return 3 + self.sequences[0]
        return {"free": 0, "kept": 1, "shared": 2}[self.kind]


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One sequence: ``tokens`` cells at positions from ``first`` to ``last``, in ``runs`` runs of cells."""

    seq: int
    tokens: int
    first: int
    last: int
    shared: int
    """How many of its cells another sequence also holds."""
    visible: int
    """How many of them its next token attends to: fewer than all with a window or chunks."""
    runs: int
    lost: bool = False


@dataclass(frozen=True)
class CellMap:
    """All cells of an attention cache, from the first to the last."""

    name: str
    note: str
    """Its window or chunk; "" if it has none."""
    cells: int
    nbytes: int
    sequences: tuple[SequenceView, ...]
    runs: tuple[CellRun, ...]
    reads: StepReads | None = None
    """What decoding one token of each sequence reads; None if nothing is stored."""

    def count(self, kind: Kind) -> int:
        """How many cells are of a kind."""
        return sum(run.size for run in self.runs if run.kind == kind)

    @property
    def used(self) -> int:
        """Cells that a sequence or a snapshot holds."""
        return self.cells - self.count("free")

    @cached_property
    def holes(self) -> tuple[CellRun, ...]:
        """Runs of free cells followed by used ones."""
        used = [i for i, run in enumerate(self.runs) if run.kind != "free"]
        return tuple(run for run in self.runs[: used[-1] if used else 0] if run.kind == "free")

    @cached_property
    def codes(self) -> np.ndarray:
        """The code of every cell (see ``CellRun.code``)."""
        return np.repeat(self.run_codes, [run.size for run in self.runs])

    @cached_property
    def run_codes(self) -> np.ndarray:
        """The code of each run."""
        return np.array([run.code for run in self.runs], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node of the radix tree: the edge ``[begin, end)``, and its snapshots."""

    parent: int | None
    """Index of its parent in ``PrefixPicture.nodes``; None below the root."""
    depth: int
    begin: int
    end: int
    text: str
    """The beginning of its text."""
    tiers: tuple[str, ...]
    """Where its snapshot lies, the nearest first: "cache" (in its cells) or "device" (copied out), "host",
    "writing" (on its way to a store), "store"."""
    nbytes: int
    """The bytes of the nearest snapshot; 0 if only a store has it, or nothing does."""
    age: float = 0.0
    """Seconds since it was created."""
    idle: int = 0
    """How many kept prefixes have been used since this one."""
    next_out: bool = False
    """Whether it is the next to leave the device."""
    hidden: int = 0
    """The number of nodes below it that are not shown."""

    @property
    def tokens(self) -> int:
        return self.end - self.begin

    @property
    def tier(self) -> str:
        """The nearest one, or "none"."""
        return self.tiers[0] if self.tiers else "none"


@dataclass(frozen=True, slots=True)
class TierView:
    """A tier: ``entries`` snapshots of ``nbytes`` in all, against its budget; None: not known."""

    name: str
    nbytes: int | None
    budget: int | None
    entries: int | None
    note: str = ""


# Blocks, beside CellMap.


@dataclass(frozen=True, slots=True)
class Heading:
    """A title, and a sentence about what it names, below it or (``beside``) on its line."""

    title: str
    sentence: str = ""
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text; ``colors`` has the style of each row's first column, "" for none.

    ``forms``: where it is shown, of "text", "svg" and "html".
    """

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    colors: tuple[str, ...]
    more: int = 0
    forms: str = "text svg html"
    titled: bool = False
    """Whether text shows the caption, too."""


def tabled(
    caption: str,
    head: tuple[str, ...],
    rows: Sequence[tuple[str, ...]],
    colors: Sequence[str] = (),
    more: int = 0,
    forms: str = "text svg html",
) -> Table:
    """A table of the first rows without columns that are empty; ``more`` rows are left out already."""
    shown = rows[:LISTED]
    wanted = [i for i, name in enumerate(head) if name or any(row[i] for row in shown)]
    picked = [tuple(row[i] for i in wanted) for row in (head, *shown)]
    styles = tuple(colors[:LISTED]) or ("",) * len(shown)
    return Table(caption, picked[0], tuple(picked[1:]), styles, more + len(rows) - len(shown), forms)


@dataclass(frozen=True, slots=True)
class Tiers:
    """Tiers, and what each of them holds in words."""

    tiers: tuple[tuple[TierView, str], ...]


@dataclass(frozen=True, slots=True)
class Tree:
    """Nodes, parents before children, each with what is known of it now, and of that what does not age."""

    nodes: tuple[tuple[NodeView, str, str], ...]
    hidden: int
    """Nodes that are left out below the root."""


@dataclass(frozen=True, eq=False, slots=True)
class MaskBlock:
    """As MaskPicture has them."""

    seen: np.ndarray
    queries: tuple[tuple[int, int], ...]
    cells: np.ndarray


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values."""

    rows: tuple[tuple[str, str], ...]


Block = Heading | Table | CellMap | Tiers | Tree | MaskBlock | Facts


# Many cells in few marks.


@dataclass(frozen=True, slots=True)
class Binned:
    """A code (see ``CellMap.codes``) for every mark, ``size`` cells each (the last one maybe fewer)."""

    size: int
    codes: np.ndarray
    """What most of the used cells of a mark are; 0 where none of them is used."""
    filled: np.ndarray
    """Which part of a mark's cells is used: 0 to 1."""


def binned(cells: CellMap, marks: int) -> Binned:
    """The cells in at most ``marks`` (>= 1) marks of equal size."""
    size = max(1, -(-cells.cells // marks))
    if size == 1:
        return Binned(1, cells.codes, (cells.codes > 0).astype(float))
    count = -(-cells.cells // size)
    bins = np.arange(cells.cells) // size
    kinds, of_run = np.unique(cells.run_codes, return_inverse=True)
    where = np.repeat(of_run, [run.size for run in cells.runs])
    table = np.bincount(bins * kinds.size + where, minlength=count * kinds.size).reshape(count, kinds.size)
    used = table[:, kinds > 0]
    if not used.shape[1]:
        return Binned(size, np.zeros(count, dtype=np.int64), np.zeros(count))
    best = np.where(used.any(axis=1), kinds[kinds > 0][used.argmax(axis=1)], 0)
    return Binned(size, best, used.sum(axis=1) / np.bincount(bins, minlength=count))


def thinned(seen: np.ndarray, rows: int, columns: int) -> tuple[np.ndarray, int, int]:
    """A mask in at most ``rows`` by ``columns`` marks: which part of each is seen, and its size."""
    down, across = (max(1, -(-size // most)) for size, most in zip(seen.shape, (rows, columns), strict=True))
    if seen.size == 0 or (down == 1 and across == 1):
        return seen.astype(float), down, across
    sums = np.add.reduceat(seen, np.arange(0, seen.shape[0], down), axis=0, dtype=np.int64)
    sums = np.add.reduceat(sums, np.arange(0, seen.shape[1], across), axis=1)
    heights = np.minimum(down, seen.shape[0] - np.arange(0, seen.shape[0], down))
    widths = np.minimum(across, seen.shape[1] - np.arange(0, seen.shape[1], across))
    return sums / (heights[:, None] * widths), down, across
