"""One palette for all drawings: sequences in colours that people with colour blindness tell apart."""

from __future__ import annotations

_SEQUENCES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b5a800", "#7f6bd6")
"""After Okabe and Ito, Color Universal Design (2008), made darker where white is behind them."""
SHARED, KEPT, FREE = "#5b2a86", "#8a8f98", "#d8dbe0"
PAPER, EMPTY, LINE, PENCIL, INK = "#fff", "#f6f7f9", "#e3e6ea", "#656d76", "#1b1f24"
"""The ground, cells that are free, thin lines, text beside the matter, and text."""
DARK = {
    PAPER: "#0d1117", EMPTY: "#21262d", LINE: "#30363d", PENCIL: "#9198a1", INK: "#e6edf3",
    SHARED: "#a371d6", FREE: "#484f58",
}  # fmt: skip
"""What these are where the reader's scheme is dark."""
_TIERS = {
    "cache": "#0072b2",
    "device": "#56b4e9",
    "leaving": "#d55e00",
    "host": "#e69f00",
    "writing": "#cc79a7",
    "store": "#009e73",
    "none": "#8a8f98",
}


_STYLES = {"dim": "dim", "free": "dim", "title": "bold", "shared": "bold reverse", "kept": KEPT}


def dark_drawing() -> str:
    """Rules of style for SVG in the dark: what was drawn in a light colour of ours has its dark one."""
    rules = [
        f'[fill="{light}"]{{fill:{dark}}}[stroke="{light}"]{{stroke:{dark}}}' for light, dark in DARK.items()
    ]
    words = f"text{{fill:{DARK[INK]}}}.dim{{fill:{DARK[PENCIL]}}}.in{{fill:#fff}}"
    return f"@media(prefers-color-scheme:dark){{{words}{''.join(rules)}}}"


def sequence_color(seq: int) -> str:
    return _SEQUENCES[seq % len(_SEQUENCES)]


def tier_color(tier: str) -> str:
    return _TIERS.get(tier, _TIERS["none"])


def rich_style(style: str) -> str:
    """A style of text.py for rich; "" for none."""
    if style.startswith("seq"):
        return sequence_color(int(style[3:]))
    if style.startswith("tier:"):
        return tier_color(style[5:])
    return _STYLES.get(style, "")
