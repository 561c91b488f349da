"""Blocks as SVG: the map of cells, the radix tree over positions, masks, tiers.

Text is escaped in ``Canvas``, and nowhere else.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from kvcache.views.blocks import (
    Binned,
    Block,
    CellMap,
    CellRun,
    Heading,
    MaskBlock,
    NodeView,
    Table,
    Tiers,
    Tree,
    binned,
    thinned,
)
from kvcache.views.colors import (
    EMPTY,
    FREE,
    INK,
    KEPT,
    LINE,
    PAPER,
    PENCIL,
    SHARED,
    dark_drawing,
    sequence_color,
    tier_color,
)
from kvcache.views.words import counted

WIDTH = 960
_CHARACTER = 6.7
"""Pixels of a character of the usual size, on average."""

_STYLE = (
    f"text{{font:12px system-ui,-apple-system,'Segoe UI',sans-serif;fill:{INK}}}"
    f".title{{font-weight:600;font-size:14px}}.dim{{fill:{PENCIL}}}.small{{font-size:10px}}"
    ".mono{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:11px}.in{fill:#fff}"
    f"{dark_drawing()}"
)
_HATCH = (
    '<defs><pattern id="kept" width="6" height="6" patternUnits="userSpaceOnUse" '
    f'patternTransform="rotate(45)"><rect width="6" height="6" fill="{PAPER}"/>'
    f'<rect width="3" height="6" fill="{KEPT}"/></pattern></defs>'
)

_LEFT = 56.0
_ROOM = WIDTH - _LEFT - 8
_PER_LINE = 64
_LINES = 32
_WIDE = 18
"""Pixels from which on every cell has a box of its own, with its position in it."""
_NAMED = 8
"""Sequences in a legend."""


class Canvas:
    """SVG elements of one drawing; ``y`` is where the next part of it begins."""

    def __init__(self, width: float = WIDTH) -> None:
        self.y = 8.0
        self.width = width
        self._elements: list[str] = []

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """``text`` on the base line ``y``; ``kind`` names classes: title, dim, small, mono, in."""
        named = f' class="{kind}"' if kind else ""
        placed = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self._elements.append(f'<text x="{_n(x)}" y="{_n(y)}"{named}{placed}>{html.escape(text)}</text>')

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        tip: str = "",
        stroke: str = "",
        opacity: float = 1.0,
    ) -> None:
        """A box; ``tip`` is what it says when pointed at."""
        line = f' stroke="{stroke}"' if stroke else ""
        shade = f' fill-opacity="{_n(opacity)}"' if opacity < 1 else ""
        place = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
        box = f'<rect {place} fill="{fill}"{line}{shade}'
        self._elements.append(f"{box}><title>{html.escape(tip)}</title></rect>" if tip else f"{box}/>")

    def path(self, points: str, stroke: str = FREE) -> None:
        """A line of SVG path data, which is ours and never foreign text."""
        self._elements.append(f'<path d="{points}" fill="none" stroke="{stroke}"/>')

    def title(self, text: str, more: str = "") -> None:
        self.text(8, self.y + 14, text, "title")
        if more:
            self.text(8, self.y + 32, fitted(more, self.width - 16), "dim")
        self.y += 42 if more else 24

    def legend(self, entries: Iterable[tuple[str, str]]) -> None:
        """(fill, what it means), side by side."""
        x = 8.0
        for fill, meaning in entries:
            width = 24 + _CHARACTER * len(meaning) + 14
            if x + width > self.width and x > 8:
                x, self.y = 8.0, self.y + 20
            self.rect(x, self.y, 14, 12, fill, stroke="#c3c8ce")
            self.text(x + 20, self.y + 10, meaning, "dim")
            x += width
        self.y += 26

    def document(self) -> str:
        """The whole drawing, on white or, where the reader's scheme is dark, on black."""
        height, width = _n(self.y + 8), _n(self.width)
        size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
        back = f'<rect width="{width}" height="{height}" fill="{PAPER}"/>'
        body = "\n".join(self._elements)
        return f"{head}\n<style>{_STYLE}</style>{_HATCH}{back}\n{body}\n</svg>\n"


def fitted(text: str, room: float) -> str:
    """As much of ``text`` as goes into ``room`` pixels, "…" where something is cut."""
    count = max(1, int(room / _CHARACTER))
    return text if len(text) <= count else text[: count - 1] + "…"


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


# Blocks.


def document(blocks: Iterable[Block]) -> str:
    """The SVG of what can be drawn of them; a mask is as wide as it needs."""
    shown = list(blocks)
    masks = [block for block in shown if isinstance(block, MaskBlock)]
    canvas = Canvas(_mask_width(masks[0].seen.shape[1]) if masks else WIDTH)
    for block in shown:
        if type(block) in _DRAWN:
            _DRAWN[type(block)](canvas, block)
    return canvas.document()


def _heading(canvas: Canvas, heading: Heading) -> None:
    canvas.title(fitted(heading.title[:1].upper() + heading.title[1:], WIDTH - 16), heading.sentence)


# Cells.


def _cells(canvas: Canvas, cells: CellMap) -> None:
    """Exact where every cell has a mark of its own, else the most frequent holder of each mark's cells."""
    bins = binned(cells, _PER_LINE * _LINES)
    marks = len(bins.codes)
    columns = min(_PER_LINE, max(marks, 16))
    step = min(36.0, _ROOM / columns)
    height = 22.0 if step < 22 else step
    for line, start in enumerate(range(0, marks, columns)):
        y = canvas.y + line * (height + 4)
        canvas.text(_LEFT - 8, y + height / 2 + 4, f"{start * bins.size}", "dim mono", "end")
    for mark, length, fill, tip, run in _boxes(cells, bins, columns):
        x = _LEFT + mark % columns * step
        y = canvas.y + mark // columns * (height + 4)
        _box(canvas, x, y, length * step, height, fill, tip, run)
        if run is not None and run.position is not None and step >= _WIDE:
            position = f"{run.position + mark - run.begin}"
            canvas.text(x + step / 2, y + height / 2 + 4, position, "in small", "middle")
    lines = -(-marks // columns)
    canvas.y += lines * (height + 4) + 8
    if bins.size > 1:
        canvas.text(_LEFT, canvas.y + 4, f"a mark is {counted(bins.size, 'cell')}", "dim small")
        canvas.y += 14
    canvas.legend(_cell_legend(cells))


def _boxes(cells: CellMap, bins: Binned, columns: int) -> Iterator[tuple[int, int, str, str, CellRun | None]]:
    """(first mark, marks, fill, tip, the run where it is exact), none of them over the end of a line."""
    if bins.size > 1:
        marks = zip(bins.codes.tolist(), bins.filled.tolist(), range(bins.codes.size), strict=True)
        for (code, part), group in itertools.groupby(marks, key=lambda mark: mark[:2]):
            places = [place for *_, place in group]
            last = min((places[-1] + 1) * bins.size, cells.cells) - 1
            tip = f"cells {places[0] * bins.size} to {last}: {100 * part:.0f} % used"
            for at, stop in _cut_at(places[0], places[-1] + 1, columns):
                yield at, stop - at, _fill(code), tip, None
        return
    longest = 1 if _ROOM / columns >= _WIDE else columns
    for run in cells.runs:
        for at, stop in _cut_at(run.begin, run.end, longest):
            yield at, stop - at, _fill(int(cells.codes[at])), _tip(run), run


def _cut_at(begin: int, end: int, columns: int) -> Iterator[tuple[int, int]]:
    """``[begin, end)`` in parts that go over no end of a line."""
    while begin < end:
        stop = min(end, (begin // columns + 1) * columns)
        yield begin, stop
        begin = stop


def _fill(code: int) -> str:
    return {0: EMPTY, 1: "url(#kept)", 2: SHARED}.get(code) or sequence_color(code - 3)


def _tip(run: CellRun) -> str:
    cells = f"cell {run.begin}" if run.size == 1 else f"cells {run.begin} to {run.end - 1}"
    snapshots = f", in {counted(run.snapshots, 'snapshot')}" if run.snapshots else ""
    if run.position is None:
        return f"{cells}: {'kept' if run.snapshots else 'free'}{snapshots}"
    holders = ", ".join(map(str, run.sequences))
    named = "sequence" if len(run.sequences) == 1 else "sequences"
    last = run.position + run.size - 1
    return f"{cells}: {named} {holders}, positions {run.position} to {last}{snapshots}"


def _box(
    canvas: Canvas,
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    tip: str,
    run: CellRun | None,
) -> None:
    """One run of cells: a shared one in the colours of its holders, underlined where snapshots hold it."""
    owners = run.sequences[:6] if run is not None else ()
    if len(owners) < 2:
        canvas.rect(x, y, width, height, fill, tip, stroke=PAPER if fill != EMPTY else LINE)
    else:
        for i, seq in enumerate(owners):
            band = height / len(owners)
            canvas.rect(x, y + i * band, width, band, sequence_color(seq), tip)
        canvas.rect(x, y, width, height, "none", stroke=PAPER)
    if run is not None and run.snapshots and run.sequences:
        canvas.rect(x, y + height - 3, width, 3, INK, tip)


def _cell_legend(cells: CellMap) -> Iterator[tuple[str, str]]:
    for view in cells.sequences[:_NAMED]:
        yield sequence_color(view.seq), f"sequence {view.seq}: {counted(view.tokens, 'token')}"
    if len(cells.sequences) > _NAMED:
        yield PAPER, f"and {len(cells.sequences) - _NAMED} more"
    if cells.count("shared"):
        exact = cells.cells <= _PER_LINE * _LINES
        yield (PAPER, "several colours: shared") if exact else (SHARED, "shared")
    if cells.count("kept"):
        yield KEPT, "kept only by snapshots"
    if any(run.snapshots and run.sequences for run in cells.runs):
        yield INK, "underlined: in a snapshot too"
    yield EMPTY, "free"


# The radix tree.

_TREE = 430.0
_ROW = 32.0
_DEEPEST = 14
"""Depths beyond are drawn at this one."""


def _tree(canvas: Canvas, tree: Tree) -> None:
    """A row for each node: how its edge begins, and where it lies among positions."""
    end = max((node.end for node, *_ in tree.nodes), default=0)
    if end:
        _axis(canvas, end)
    depths = {-1: canvas.y}
    for node, _, facts in tree.nodes:
        _node(canvas, node, facts, end, depths)
        _left_out(canvas, node.hidden, node.depth + 1)
    _left_out(canvas, tree.hidden, 0)
    canvas.y += 6
    shown = dict.fromkeys(node.tier for node, *_ in tree.nodes)
    canvas.legend((tier_color(tier), _TIER_NAMES.get(tier, tier)) for tier in shown)


def _left_out(canvas: Canvas, count: int, depth: int) -> None:
    if count:
        canvas.text(_indent(depth), canvas.y + 14, f"... {count:,} more", "dim")
        canvas.y += 22


_TIER_NAMES = {
    "cache": "in the cache's cells",
    "device": "copied out, on the device",
    "host": "host memory",
    "writing": "being written",
    "store": "in a store",
    "none": "nothing kept",
}


def _tiers(canvas: Canvas, tiers: Tiers) -> None:
    for tier, words in tiers.tiers:
        canvas.text(8, canvas.y + 10, fitted(words, _TREE), "mono")
        if tier.nbytes is not None and tier.budget:
            part = min(1.0, tier.nbytes / tier.budget)
            canvas.rect(_TREE, canvas.y, WIDTH - _TREE - 8, 12, EMPTY, stroke=LINE)
            canvas.rect(_TREE, canvas.y, (WIDTH - _TREE - 8) * part, 12, tier_color(tier.name), words)
        canvas.y += 18


def _axis(canvas: Canvas, end: int) -> None:
    canvas.text(_TREE, canvas.y + 14, "position 0", "dim small")
    canvas.text(WIDTH - 8, canvas.y + 14, f"{end:,}", "dim small", "end")
    canvas.y += 20


def _indent(depth: int) -> float:
    return 14.0 + 16 * min(depth, _DEEPEST)


def _node(canvas: Canvas, node: NodeView, facts: str, end: int, above: dict[int, float]) -> None:
    """``above`` has where the last node of each depth was drawn."""
    x, y = _indent(node.depth), canvas.y
    if node.depth:
        parent = above[node.depth - 1] + 18
        canvas.path(f"M{x - 10:.0f} {parent:.0f} V{y + 10:.0f} H{x - 2:.0f}", "#9aa1a9")
    above[node.depth] = y
    canvas.text(x, y + 14, fitted(f"“{node.text}”", _TREE - x - 12), "mono")
    scale = (WIDTH - 8 - _TREE) / end
    tip = f"{node.text} / {' + '.join(node.tiers) or 'nothing kept'}: {facts}"
    width = max(2.0, node.tokens * scale)
    left = min(_TREE + node.begin * scale, WIDTH - 8 - width)
    canvas.rect(left, y + 4, width, 10, tier_color(node.tier), tip)
    canvas.text(_TREE, y + 26, fitted(facts, WIDTH - _TREE), "dim small")
    canvas.y += _ROW


# Masks, and tables.


_MASK_ROWS, _MASK_COLUMNS = 96, 128
_MASK_STEP = 26.0
_MASK_LEAST = 330.0
"""Pixels that the heading of a small mask needs."""


def _mask_width(columns: int) -> float:
    return min(WIDTH, max(_MASK_LEAST, _LEFT + 8 + min(_MASK_COLUMNS, columns) * _MASK_STEP))


def _mask(canvas: Canvas, picture: MaskBlock) -> None:
    part, down, across = thinned(picture.seen, _MASK_ROWS, _MASK_COLUMNS)
    rows, columns = part.shape
    step = min(_MASK_STEP, _ROOM / max(1, columns))
    numbered = step >= 18 and across == 1
    if numbered:
        for j, cell in enumerate(picture.cells.tolist()):
            canvas.text(_LEFT + (j + 0.5) * step, canvas.y + 10, f"{cell}", "dim small", "middle")
        canvas.y += 16
    for i in range(rows):
        seq, position = picture.queries[i * down]
        if step >= 10 or i % 8 == 0:
            canvas.text(_LEFT - 8, canvas.y + step / 2 + 4, f"{seq}:{position}", "dim small", "end")
        for j in range(columns):
            seen = float(part[i, j])
            fill = sequence_color(seq) if seen else EMPTY
            tip = f"token {position} of sequence {seq}, cell {int(picture.cells[j * across])}"
            shade = 0.3 + 0.7 * seen if seen else 1.0
            stroke = PAPER if step >= 6 else ""
            canvas.rect(_LEFT + j * step, canvas.y, step, step, fill, tip, stroke, shade)
        canvas.y += step
    size = "" if down == across == 1 else f"; a mark is {down} by {across}"
    canvas.text(_LEFT, canvas.y + 16, f"rows: sequence:position; columns: cells{size}", "dim small")
    canvas.y += 26


def _table(canvas: Canvas, table: Table) -> None:
    if not table.rows or "svg" not in table.forms:
        return
    step = (WIDTH - 16) / len(table.head)
    for i, row in enumerate((table.head, *table.rows)):
        for j, cell in enumerate(row):
            kind = "mono" if i else "dim small"
            canvas.text(8 + j * step, canvas.y + 12, fitted(cell, step - 8), kind)
        canvas.y += 18
    if table.more:
        canvas.text(8, canvas.y + 12, f"... {table.more:,} more", "dim")
        canvas.y += 18
    canvas.y += 8


_DRAWN: Mapping[type, Callable[[Canvas, Any], None]] = {
    CellMap: _cells,
    Heading: _heading,
    MaskBlock: _mask,
    Table: _table,
    Tiers: _tiers,
    Tree: _tree,
}
