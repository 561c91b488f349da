"""Writing SVG: shapes and text from the top down. Text is escaped here, and nowhere else."""

from __future__ import annotations

import html
from collections.abc import Iterable

from kvcache.views.colors import FREE, INK, KEPT, PAPER, PENCIL, dark_drawing

__all__ = ["WIDTH", "Canvas", "fitted"]

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
