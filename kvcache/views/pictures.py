"""Pictures of caches, prefix caches, masks, stores and serialized snapshots.

Each is plain data of one moment, without tensors or references to the original object, and can be kept,
compared and sent as JSON. Its content is described once, in blocks, from which every format is drawn.
"""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcache import StepReads, bytes_text
from kvcache.cache import InvalidRangeError
from kvcache.views import html, svg, text
from kvcache.views.blocks import (
    Block,
    CellMap,
    Facts,
    Heading,
    MaskBlock,
    NodeView,
    Table,
    Tiers,
    TierView,
    Tree,
    tabled,
)
from kvcache.views.text import Line
from kvcache.views.words import age_text, counted

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    "NOT_CHECKED",
    "CachePicture",
    "EncoderEntry",
    "EncoderView",
    "EntryView",
    "MaskPicture",
    "OtherView",
    "PagePart",
    "PagePicture",
    "Part",
    "Picture",
    "PrefixPicture",
    "SessionView",
    "StateView",
    "StatesView",
    "StorePicture",
]  # fmt: skip

NOT_CHECKED = "digest not checked without the key"
"""The note of an entry whose digest is keyed by a secret."""


class Picture(ABC):
    """The methods of all pictures. ``print(picture)`` draws text, a notebook HTML, and rich colours."""

    @abstractmethod
    def blocks(self) -> Iterator[Block]:
        """The content, from top to bottom."""

    def record(self) -> dict[str, Any]:
        """All of it as dicts, lists, numbers and strings."""
        return {"picture": type(self).__name__, **_fields(self)}

    def text(self, width: int = 80) -> str:
        """Plain text of at most ``width`` columns, with no escape codes."""
        return text.plain(self.lines(width))

    def lines(self, width: int) -> list[Line]:
        """The text as spans of (text, style), which rich draws in colours."""
        return text.draw(self.blocks(), width)

    def svg(self) -> str:
        """The drawing alone, as an SVG document."""
        return svg.document(self.blocks())

    def html(self, title: str = "") -> str:
        """A self-contained page: drawings as inline SVG, tables, no scripts."""
        return html.page(list(self.blocks()), title or str(getattr(self, "name", "Cache")))

    def json(self) -> str:
        """``record()`` as JSON."""
        return json.dumps(self.record(), ensure_ascii=False)

    def save(self, path: str | Path) -> Path:
        """Write it in the format given by the extension of ``path``: .html, .svg, .json or .txt. Raises
        InvalidRangeError for others.
        """
        path = Path(path)
        makers = {".html": self.html, ".svg": self.svg, ".json": self.json, ".txt": self.text}
        maker = makers.get(path.suffix.lower())
        if maker is None:
            raise InvalidRangeError(f"save: {path}; a picture ends in {', '.join(makers)}")
        path.write_text(maker(), encoding="utf-8")
        return path

    def __str__(self) -> str:
        return self.text()

    def __rich__(self) -> RenderableType:
        from kvcache.views.terminal import Drawn  # rich is there where it is asked for

        return Drawn(self.lines)

    def _repr_html_(self) -> str:
        return html.fragment(list(self.blocks()))


def _fields(view: Any) -> dict[str, Any]:
    """A dataclass as a dict of JSON-able values."""
    return {field.name: _plain(getattr(view, field.name)) for field in dataclasses.fields(view)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _fields(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


# A cache.


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
    """A cache of another package, about which nothing more is known."""

    name: str
    nbytes: int


Part = CellMap | StatesView | EncoderView | OtherView


@dataclass(frozen=True)
class CachePicture(Picture):
    """A cache, with one part for each cell table, set of states, or set of encoder outputs."""

    name: str
    nbytes: int
    parts: tuple[Part, ...]

    @property
    def maps(self) -> tuple[CellMap, ...]:
        return tuple(part for part in self.parts if isinstance(part, CellMap))

    def blocks(self) -> Iterator[Block]:
        if len(self.parts) > 1:
            yield Heading(self.name, f"{bytes_text(self.nbytes)} in {len(self.parts)} parts", beside=True)
        for part in self.parts:
            yield from _part(part)


def _part(part: Part) -> Iterator[Block]:
    if isinstance(part, CellMap):
        yield Heading(part.name + (f" ({part.note})" if part.note else ""), _cells_sentence(part))
        yield part
        yield _sequences(part)
        if part.reads is not None:
            yield Facts(tuple(_reads(part.reads)))
    elif isinstance(part, StatesView):
        yield Heading(part.name, f"{counted(part.slots, 'slot')}, {bytes_text(part.nbytes)}", beside=True)
        yield _states(part)
    else:
        yield Heading(part.name, bytes_text(part.nbytes), beside=True)
        if isinstance(part, EncoderView):
            yield _encoder(part)


def _cells_sentence(cells: CellMap) -> str:
    """'11 of 64 cells used, 2 shared, 3 kept only by snapshots, 2 holes (the largest 20 cells)'."""
    parts = [f"{cells.used:,} of {counted(cells.cells, 'cell')} used"]
    if shared := cells.count("shared"):
        parts.append(f"{shared:,} shared")
    if kept := cells.count("kept"):
        parts.append(f"{kept:,} kept only by snapshots")
    if cells.holes:
        largest = max(run.size for run in cells.holes)
        parts.append(f"{counted(len(cells.holes), 'hole')} (the largest {counted(largest, 'cell')})")
    return ", ".join([*parts, bytes_text(cells.nbytes)])


def _reads(reads: StepReads) -> Iterator[tuple[str, str]]:
    """What a step that decodes a token of each sequence reads."""
    calls = counted(reads.calls, "call")
    besides = f", and {reads.padding:,} of padding" if reads.padding else ""
    yield "a step reads", f"{counted(reads.cells, 'cell')} a layer in {calls}{besides}"
    if reads.shared:
        yield "once for several", f"{counted(reads.shared, 'cell')}, {reads.saved:,} saved"
    if reads.gathered:
        yield "gathered", counted(reads.gathered, "cell")


def _sequences(cells: CellMap) -> Table:
    rows = [
        (
            f"{view.seq}",
            f"{view.tokens:,}",
            f"{view.first} to {view.last}",
            f"{view.shared:,}",
            f"{view.visible:,}",
            f"{view.runs:,}",
            "lost" if view.lost else "",
        )
        for view in cells.sequences
    ]
    head = ("sequence", "tokens", "positions", "shared", "next token sees", "runs", "")
    colors = [f"seq{view.seq}" for view in cells.sequences]
    return tabled(f"{cells.name}: sequences", head, rows, colors, forms="text html")


def _states(states: StatesView) -> Table:
    rows = [
        (
            f"{row.seq}",
            f"{row.tokens:,}",
            "to be loaded" if row.slot is None else f"{row.slot}",
            " ".join(map(str, row.checkpoints)) or "-",
            "lost" if row.lost else "",
        )
        for row in states.rows
    ]
    head = ("sequence", "state of tokens", "slot", "checkpoints at", "")
    return tabled(states.name, head, rows, [f"seq{row.seq}" for row in states.rows])


def _encoder(view: EncoderView) -> Table:
    rows = [
        (
            ", ".join(map(str, row.sequences)),
            f"{row.length:,}",
            f"{row.position}",
            f"{row.layers}",
            bytes_text(row.nbytes),
        )
        for row in view.rows
    ]
    head = ("sequences", "length", "came with position", "layers", "bytes")
    return tabled(view.name, head, rows, [f"seq{row.sequences[0]}" for row in view.rows])


# A PrefixCache.


@dataclass(frozen=True, slots=True)
class SessionView:
    """An open session: ``evaluated`` of its ``tokens`` are in the cache, ``cached`` of them from before."""

    seq: int
    tokens: int
    cached: int
    evaluated: int
    text: str


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

    def html(self, title: str = "") -> str:
        return super().html(title or "Prefix cache")

    def blocks(self) -> Iterator[Block]:
        yield Heading("prefix tree", self._sentence(), beside=True)
        yield Tiers(tuple((tier, _tier_text(tier)) for tier in self.tiers))
        known = ((node, _facts(node, span=False), _facts(node, ages=False)) for node in self.nodes)
        yield Tree(tuple(known), self.hidden)
        sessions = [
            (f"{view.seq}", f"{view.tokens:,}", f"{view.evaluated:,}", f"{view.cached:,}", view.text)
            for view in self.sessions
        ]
        head = ("sequence", "tokens", "in the cache", "found there", "begins")
        colors = [f"seq{view.seq}" for view in self.sessions]
        yield replace(tabled("open sessions", head, sessions, colors, forms="text html"), titled=True)
        nodes = [("· " * node.depth + node.text, "+".join(node.tiers), _facts(node)) for node in self.nodes]
        colors = [f"tier:{node.tier}" for node in self.nodes]
        yield tabled("nodes", ("begins", "tier", "facts"), nodes, colors, forms="html")
        yield from self.cache.blocks()

    def _sentence(self) -> str:
        parts = [counted(self.total, "node")]
        if self.tokens:
            share = f"{100 * self.reused / self.tokens:.0f} %"
            parts.append(f"{self.reused:,} of {self.tokens:,} prompt tokens reused ({share})")
        if self.evicted:
            parts.append(f"{self.evicted:,} evicted")
        return ", ".join(parts)


def _tier_text(tier: TierView) -> str:
    """'device 3.0 KiB of 1.0 MiB, 2 snapshots'."""
    if tier.nbytes is None:
        budget = f", budget {bytes_text(tier.budget)}" if tier.budget is not None else ""
        return f"{tier.name} {tier.note}{budget}".strip()
    limit = "" if tier.budget is None else f" of {bytes_text(tier.budget)}"
    count = "" if tier.entries is None else f", {counted(tier.entries, 'snapshot')}"
    return f"{tier.name} {bytes_text(tier.nbytes)}{limit}{count}"


def _facts(node: NodeView, ages: bool = True, span: bool = True) -> str:
    """'12 tokens, [0, 12), 3.0 KiB, 5 s old, leaves first'."""
    facts = [counted(node.tokens, "token")]
    facts += [f"[{node.begin}, {node.end})"] if span else []
    if not node.tiers:
        return ", ".join([*facts, "nothing kept here"])
    facts += [bytes_text(node.nbytes)] if node.nbytes else []
    facts += [f"{age_text(node.age)} old"] if ages else []
    facts += [f"{node.idle:,} used since"] if ages and node.idle else []
    facts += ["leaves first"] if node.next_out else []
    return ", ".join(facts)


# A mask.


@dataclass(frozen=True, eq=False)
class MaskPicture(Picture):
    """The mask of one pass: ``seen[i, j]`` is whether token i of the batch attends to cell j."""

    name: str
    seen: np.ndarray
    """(tokens, history) of bool, in the order of ``get``; no padded rows."""
    queries: tuple[tuple[int, int], ...]
    """(sequence, position) of each row."""
    cells: np.ndarray
    """The cell of each column."""

    def blocks(self) -> Iterator[Block]:
        tokens, history = self.seen.shape
        pairs = f"{int(self.seen.sum()):,} of {tokens * history:,} pairs"
        sentence = f"{counted(tokens, 'token')} over {counted(history, 'cell')}, {pairs}"
        yield Heading(f"mask of {self.name}", sentence, beside=True)
        yield MaskBlock(self.seen, self.queries, self.cells)


# What lies on disk.


@dataclass(frozen=True, slots=True)
class PagePart:
    """One cache's share of a snapshot: K and V of ``tokens`` positions in ``layers`` layers, or states."""

    kind: str
    tokens: int
    layers: int
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class PagePicture(Picture):
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

    def summary(self) -> str:
        """One line: the positions it spans, its tokens and bytes."""
        tokens = "" if self.tokens is None else f", {counted(self.tokens, 'token')}"
        return f"positions [{self.begin}, {self.end}){tokens}, {bytes_text(self.nbytes)}"

    def blocks(self) -> Iterator[Block]:
        yield Heading(self.name, self.summary())
        rows = [
            (part.kind, f"{part.tokens:,}", f"{part.layers}", part.dtype, bytes_text(part.nbytes))
            for part in self.parts
        ]
        yield tabled("", ("kind", "positions", "layers", "dtype", "bytes"), rows, ["title"] * len(rows))
        yield Facts(self.facts)


@dataclass(frozen=True, slots=True)
class EntryView:
    """An entry of a store; ``problem`` says why it cannot be read, "" if it can.

    ``note`` says what was not checked, "" if everything was.
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

    @property
    def short_key(self) -> str:
        return self.key[:16] + ("…" if len(self.key) > 16 else "")


@dataclass(frozen=True)
class StorePicture(Picture):
    """The folder of a FileStore: the most recently used entries, and totals of all entries."""

    name: str
    total: int
    nbytes: int
    budget: int | None
    entries: tuple[EntryView, ...]
    writing: int
    """The number of temporary files, of active or dead writers."""

    def summary(self) -> str:
        """One line: the number of entries, their bytes, and how many are broken."""
        limit = "" if self.budget is None else f" of {bytes_text(self.budget)}"
        writing = f", {counted(self.writing, 'temporary file')}" if self.writing else ""
        count = sum(bool(entry.problem) for entry in self.entries)
        broken = f", {count} broken" if count else ""
        unchecked = sum(bool(entry.note) for entry in self.entries)
        note = f"; {NOT_CHECKED}: {counted(unchecked, 'entry')}" if unchecked else ""
        return f"{counted(self.total, 'entry')}, {bytes_text(self.nbytes)}{limit}{broken}{writing}{note}"

    def blocks(self) -> Iterator[Block]:
        yield Heading(self.name, self.summary())
        rows = [
            (
                entry.short_key,
                f"[{entry.begin}, {entry.end})" if entry.kind else "-",
                entry.kind or "-",
                bytes_text(entry.nbytes),
                age_text(entry.age),
                "broken" if entry.problem else entry.note,
            )
            for entry in self.entries
        ]
        styles = ["tier:none" if entry.problem else "tier:store" for entry in self.entries]
        head = ("key", "positions", "kind", "bytes", "last used", "")
        yield tabled("", head, rows, styles, self.total - len(rows))
        if broken := tuple((entry.short_key, entry.problem) for entry in self.entries if entry.problem):
            yield Heading("Broken", "what is wrong with these entries")
            yield Facts(broken)
