"""The sentences and tables under a drawing, the same in text and in HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvcache.views.data import (
    CellMap,
    EncoderView,
    MaskData,
    NodeView,
    PageData,
    PrefixData,
    StatesView,
    StoreData,
    TierView,
)
from kvcache.views.words import age_text, bytes_text, counted

__all__ = [
    "NOT_CHECKED", "Table", "cells_line", "encoder_table", "mask_line", "node_facts", "page_line",
    "page_table", "prefix_line", "sequence_table", "session_table", "states_table", "store_line",
    "store_table", "tabled", "tier_text",
]  # fmt: skip

LISTED = 64
"""Rows of a table; what is left out is counted."""
NOT_CHECKED = "digest not checked without the key"
"""The note of an entry whose digest is keyed by a secret."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text; ``colors`` has the style of each row's first column, "" for none."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    colors: tuple[str, ...]
    more: int = 0


def cells_line(cells: CellMap) -> str:
    """'11 of 64 cells used, 2 shared, 3 kept by snapshots alone, 2 holes (the largest 20 cells)'."""
    parts = [f"{cells.used:,} of {counted(cells.cells, 'cell')} used"]
    if shared := cells.count("shared"):
        parts.append(f"{shared:,} shared")
    if kept := cells.count("kept"):
        parts.append(f"{kept:,} kept by snapshots alone")
    if cells.holes:
        largest = max(run.size for run in cells.holes)
        parts.append(f"{counted(len(cells.holes), 'hole')} (the largest {counted(largest, 'cell')})")
    return ", ".join([*parts, bytes_text(cells.nbytes)])


def sequence_table(cells: CellMap) -> Table:
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
    return tabled(head, rows, [f"seq{view.seq}" for view in cells.sequences])


def states_table(states: StatesView) -> Table:
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
    return tabled(
        ("sequence", "state of tokens", "slot", "checkpoints at", ""),
        rows,
        [f"seq{row.seq}" for row in states.rows],
    )


def encoder_table(view: EncoderView) -> Table:
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
    return tabled(head, rows, [f"seq{row.sequences[0]}" for row in view.rows])


def session_table(picture: PrefixData) -> Table:
    rows = [
        (f"{view.seq}", f"{view.tokens:,}", f"{view.evaluated:,}", f"{view.cached:,}", view.text)
        for view in picture.sessions
    ]
    return tabled(
        ("sequence", "tokens", "in the cache", "found there", "begins"),
        rows,
        [f"seq{view.seq}" for view in picture.sessions],
    )


def tabled(
    head: tuple[str, ...], rows: Sequence[tuple[str, ...]], colors: Sequence[str], more: int = 0
) -> Table:
    """A table without columns that are empty; ``more`` rows are left out already."""
    shown = rows[:LISTED]
    wanted = [i for i, name in enumerate(head) if name or any(row[i] for row in shown)]
    picked = [tuple(row[i] for i in wanted) for row in (head, *shown)]
    return Table(picked[0], tuple(picked[1:]), tuple(colors[:LISTED]), more + len(rows) - len(shown))


def prefix_line(picture: PrefixData) -> str:
    parts = [counted(picture.total, "node")]
    if picture.tokens:
        share = f"{100 * picture.reused / picture.tokens:.0f} %"
        parts.append(f"{picture.reused:,} of {picture.tokens:,} prompt tokens reused ({share})")
    if picture.evicted:
        parts.append(f"{picture.evicted:,} evicted")
    return ", ".join(parts)


def tier_text(tier: TierView) -> str:
    """'device 3.0 KiB of 1.0 MiB, 2 snapshots'."""
    if tier.nbytes is None:
        budget = f", budget {bytes_text(tier.budget)}" if tier.budget is not None else ""
        return f"{tier.name} {tier.note}{budget}".strip()
    limit = "" if tier.budget is None else f" of {bytes_text(tier.budget)}"
    count = "" if tier.entries is None else f", {counted(tier.entries, 'snapshot')}"
    return f"{tier.name} {bytes_text(tier.nbytes)}{limit}{count}"


def node_facts(node: NodeView, ages: bool = True, span: bool = True) -> Iterator[str]:
    """'12 tokens', '[0, 12)', '3.0 KiB', '5 s old', 'pinned', 'leaves first'."""
    yield counted(node.tokens, "token")
    if span:
        yield f"[{node.begin}, {node.end})"
    if not node.tiers:
        yield "nothing kept here"
        return
    if node.nbytes:
        yield bytes_text(node.nbytes)
    if ages:
        yield f"{age_text(node.age)} old"
    if ages and node.idle:
        yield f"{node.idle:,} used since"
    if node.pins:
        yield "pinned" if node.pins == 1 else f"pinned {node.pins} times"
    if node.next_out:
        yield "leaves first"


def mask_line(picture: MaskData) -> str:
    tokens, history = picture.seen.shape
    seen = int(picture.seen.sum())
    return (
        f"{counted(tokens, 'token')} over {counted(history, 'cell')}, {seen:,} of {tokens * history:,} pairs"
    )


def page_line(picture: PageData) -> str:
    tokens = "" if picture.tokens is None else f", {counted(picture.tokens, 'token')}"
    return f"positions [{picture.begin}, {picture.end}){tokens}, {bytes_text(picture.nbytes)}"


def page_table(picture: PageData) -> Table:
    rows = [
        (part.kind, f"{part.tokens:,}", f"{part.layers}", part.dtype, bytes_text(part.nbytes))
        for part in picture.parts
    ]
    return tabled(("kind", "positions", "layers", "dtype", "bytes"), rows, ["title"] * len(rows))


def store_line(picture: StoreData) -> str:
    limit = "" if picture.budget is None else f" of {bytes_text(picture.budget)}"
    writing = f", {counted(picture.writing, 'temporary file')}" if picture.writing else ""
    count = sum(bool(entry.problem) for entry in picture.entries)
    broken = f", {count} broken" if count else ""
    unchecked = sum(bool(entry.note) for entry in picture.entries)
    note = f"; {NOT_CHECKED}: {counted(unchecked, 'entry')}" if unchecked else ""
    return f"{counted(picture.total, 'entry')}, {bytes_text(picture.nbytes)}{limit}{broken}{writing}{note}"


def store_table(picture: StoreData) -> Table:
    rows = [
        (
            entry.key[:16] + ("…" if len(entry.key) > 16 else ""),
            f"[{entry.begin}, {entry.end})" if entry.kind else "-",
            entry.kind or "-",
            bytes_text(entry.nbytes),
            age_text(entry.age),
            entry.problem or entry.note,
        )
        for entry in picture.entries
    ]
    styles = ["tier:none" if entry.problem else "tier:store" for entry in picture.entries]
    head = ("key", "positions", "kind", "bytes", "last used", "")
    return tabled(head, rows, styles, picture.total - len(rows))
