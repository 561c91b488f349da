"""Blocks as lines of styled text: plain, or (terminal.py) for rich."""

from __future__ import annotations

import itertools
import math
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcache.views.blocks import (
    Block,
    CellMap,
    Facts,
    Heading,
    MaskBlock,
    Table,
    Tiers,
    Tree,
    binned,
    thinned,
)
from kvcache.views.words import counted

Span = tuple[str, str]
"""(text, style): "", "dim", "title", "kept", "shared", "free", "tier:NAME", or "seqN"."""
Line = list[Span]

ROWS = 16
"""Lines of a map of cells, or of a mask."""
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_MARKS = {0: "·", 1: "*", 2: "+"}
_SHADES = "·░▒▓█"
_LEAST = 8
"""Columns that a column of words keeps, however narrow the terminal is."""


def draw(blocks: Iterable[Block], width: int = 80) -> list[Line]:
    """An empty line before every further heading; lines that are longer than ``width`` (>= 24) are cut."""
    lines: list[Line] = []
    for block in blocks:
        if lines and isinstance(block, Heading):
            lines.append([])
        lines += _DRAWN[type(block)](block, max(24, width))
    return [_cut(line, width) for line in lines]


def _heading(block: Heading, width: int) -> Iterator[Line]:
    """The sentence on the title's line where there is room, else below it."""
    if block.beside and len(block.title) + 2 + len(block.sentence) <= width:
        yield [(block.title, "title"), (f"  {block.sentence}", "")]
    else:
        yield [(block.title, "title")]
        yield from _wrapped(block.sentence, 2, width, "")


def _facts(block: Facts, width: int) -> Iterator[Line]:
    """The value beside its name if there is room, else below it: a reason that is cut off helps nobody."""
    for name, value in block.rows:
        if 4 + cells_wide(name) + cells_wide(value) <= width:
            yield [(f"  {name}  ", "dim"), (value, "")]
        else:
            yield [(f"  {name}", "dim")]
            yield from _wrapped(value, 4, width, "")


def _tiers(block: Tiers, _: int) -> Iterator[Line]:
    for tier, words in block.tiers:
        yield [("  ", ""), (words, f"tier:{tier.name}")]


# Cells.


def _cells(cells: CellMap, width: int) -> Iterator[Line]:
    margin = len(f"{cells.cells}") + 2
    columns = _columns(width - margin)
    bins = binned(cells, columns * ROWS)
    codes = bins.codes.tolist()
    rows = [codes[start : start + columns] for start in range(0, len(codes), columns)]
    at = 0
    for used, group in itertools.groupby(rows, key=any):
        lines = list(group)
        for i, row in enumerate(lines):
            start = (at + i) * columns * bins.size
            if i and not used and len(lines) > 3:
                yield [(f"{'⋮':>{margin - 2}}  {len(lines) - 1} more lines of free cells", "dim")]
                break
            spans = _merged((_mark(code), _style(code)) for code in row)
            yield [(f"{start:>{margin - 2}}  ", "dim"), *spans]
        at += len(lines)
    yield from _wrapped(_legend(cells, bins.size), margin, width, "dim")


def _columns(room: int) -> int:
    """How many marks a line has: 8, 16, 32, 64 or 128, so that cells are easily counted."""
    return max([8, *(n for n in (16, 32, 64, 128) if n <= room)])


def _mark(code: int) -> str:
    if code in _MARKS:
        return _MARKS[code]
    return _DIGITS[code - 3] if code - 3 < len(_DIGITS) else "#"


def _style(code: int) -> str:
    return {0: "free", 1: "kept", 2: "shared"}.get(code, f"seq{code - 3}")


def _legend(cells: CellMap, size: int) -> str:
    parts = ["0-9a-zA-Z the sequence that holds it"] if cells.sequences else []
    parts += ["+ shared"] if cells.count("shared") else []
    parts += ["* kept by snapshots"] if cells.count("kept") else []
    return ", ".join([*parts, "· free", f"a mark is {counted(size, 'cell')}"])


# The radix tree.


@dataclass(frozen=True, slots=True)
class _Step:
    """A node to draw; index None: how many are left out there."""

    index: int | None
    indent: str
    last: bool
    hidden: int = 0


def _tree(tree: Tree, width: int) -> Iterator[Line]:
    """Depth-first, without recursion: conversations nest deep."""
    children: dict[int | None, list[int]] = {}
    for i, (node, *_) in enumerate(tree.nodes):
        children.setdefault(node.parent, []).append(i)

    def below(parent: int | None, hidden: int, indent: str) -> list[_Step]:
        own = children.get(parent, [])
        steps = [_Step(index, indent, i == len(own) - 1 and not hidden) for i, index in enumerate(own)]
        steps += [_Step(None, indent, True, hidden)] if hidden else []
        return steps[::-1]

    waiting = below(None, tree.hidden, "")
    while waiting:
        step = waiting.pop()
        room = width // 3
        indent = step.indent if len(step.indent) <= room else "⋯" + step.indent[-room:]
        connector = (indent + ("└─ " if step.last else "├─ "), "dim")
        if step.index is None:
            yield [connector, (f"... {step.hidden:,} more", "dim")]
            continue
        node, facts, _ = tree.nodes[step.index]
        tiers = "+".join(node.tiers) or "empty"
        taken = cells_wide(connector[0]) + len(tiers) + len(facts) + 4
        text = _fitted(node.text, max(min(room, 12), min(room, width - taken)))
        yield [connector, (f"{text}  ", ""), (tiers, f"tier:{node.tier}"), (f"  {facts}", "dim")]
        waiting += below(step.index, node.hidden, step.indent + ("   " if step.last else "│  "))


# A mask.


def _mask(mask: MaskBlock, width: int) -> Iterator[Line]:
    labels = [f"{seq}:{position}" for seq, position in mask.queries]
    margin = max([len(label) for label in labels], default=0) + 1
    part, down, across = thinned(mask.seen, 2 * ROWS, max(8, width - margin))
    for i, row in enumerate(part):
        seq = mask.queries[i * down][0]
        spans = _merged((_shade(share), f"seq{seq}" if share else "free") for share in row.tolist())
        yield [(f"{labels[i * down]:>{margin - 1}} ", "dim"), *spans]
    size = "" if down == across == 1 else f", a mark is {down} by {across}"
    yield [(" " * margin + f"rows are sequence:position, columns are cells{size}", "dim")]


def _shade(share: float) -> str:
    return _SHADES[math.ceil(share * (len(_SHADES) - 1))]


# Lines.


def _table(table: Table, width: int) -> Iterator[Line]:
    if not table.rows or "text" not in table.forms:
        return
    if table.titled:
        yield []
        yield [(table.caption, "title")]
    widths, numbers = _column_widths(table, width)
    yield [("  " + "  ".join(_padded(table.head, widths, numbers)), "dim")]
    for row, style in zip(table.rows, table.colors, strict=True):
        first, *rest = _padded(row, widths, numbers)
        yield [("  " + first, style), ("".join(f"  {cell}" for cell in rest).rstrip(), "")]
    if table.more:
        yield [(f"  ... {table.more:,} more", "dim")]


def _column_widths(table: Table, width: int) -> tuple[list[int], list[bool]]:
    """Columns of each column, and whether it is one of numbers; words give way where there is no room."""
    columns = [*zip(table.head, *table.rows, strict=True)]
    widths = [max(map(cells_wide, column)) for column in columns]
    numbers = [all(cell.replace(",", "").isdigit() for cell in column[1:]) for column in columns]
    least = [max(cells_wide(column[0]), _LEAST) for column in columns]
    excess = sum(widths) + 2 * len(widths) - width
    for i in sorted(range(len(widths)), key=widths.__getitem__, reverse=True):
        if excess > 0 and not numbers[i]:
            smaller = max(least[i], widths[i] - excess)
            excess -= max(0, widths[i] - smaller)
            widths[i] = min(widths[i], smaller)
    return widths, numbers


def _padded(row: Sequence[str], widths: Sequence[int], numbers: Sequence[bool]) -> list[str]:
    """Numbers to the right, words to the left; nothing behind the last ones."""
    cells = []
    for cell, size, number in zip(row, widths, numbers, strict=True):
        shown = _fitted(cell, size)
        blanks = " " * (size - cells_wide(shown))
        cells.append(blanks + shown if number else shown + blanks)
    return [*cells[:-1], cells[-1].rstrip()]


def _wrapped(text: str, indent: int, width: int, style: str) -> Iterator[Line]:
    for line in textwrap.wrap(text, width, initial_indent=" " * indent, subsequent_indent=" " * indent):
        yield [(line, style)]


def _merged(marks: Iterable[Span]) -> Line:
    """Marks of one style side by side as one span."""
    styles = itertools.groupby(marks, key=lambda mark: mark[1])
    return [("".join(text for text, _ in run), style) for style, run in styles]


def _cut(line: Line, width: int) -> Line:
    """The first ``width`` columns, "…" where something is cut; no blanks at the end."""
    lines: Line = []
    too_long = sum(cells_wide(text) for text, _ in line) > width
    room = width - too_long
    for text, style in line:
        kept = _first_columns(text, room)
        room -= cells_wide(kept)
        lines.append((kept, style))
        if kept != text:
            lines.append(("…", "dim"))
            break
    while lines and not lines[-1][0].strip():
        lines.pop()
    if lines:
        lines[-1] = lines[-1][0].rstrip(), lines[-1][1]
    return lines


def _fitted(text: str, columns: int) -> str:
    return text if cells_wide(text) <= columns else _first_columns(text, columns - 1) + "…"


def _first_columns(text: str, room: int) -> str:
    if text.isascii():
        return text[:room]
    used = itertools.accumulate(cells_wide(c) for c in text)
    return text[: next((i for i, columns in enumerate(used) if columns > room), len(text))]


def cells_wide(text: str) -> int:
    """Columns of a terminal: East Asian wide characters take two, marks that combine none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text
    )


_DRAWN: Mapping[type, Callable[[Any, int], Iterator[Line]]] = {
    CellMap: _cells,
    Facts: _facts,
    Heading: _heading,
    MaskBlock: _mask,
    Table: _table,
    Tiers: _tiers,
    Tree: _tree,
}


def plain(lines: Iterable[Line]) -> str:
    """Without styles."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)
