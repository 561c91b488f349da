"""One palette for all drawings: sequences in colours that people with colour blindness tell apart."""

from __future__ import annotations

__all__ = ["FREE", "KEPT", "SHARED", "color", "rich_style", "sequence_color", "sgr", "tier_color"]

_SEQUENCES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b5a800", "#7f6bd6")
"""After Okabe and Ito, Color Universal Design (2008), made darker where white is behind them."""
SHARED, KEPT, FREE = "#5b2a86", "#8a8f98", "#d8dbe0"
_TIERS = {
    "cache": "#0072b2",
    "device": "#56b4e9",
    "leaving": "#d55e00",
    "host": "#e69f00",
    "writing": "#cc79a7",
    "store": "#009e73",
    "none": "#8a8f98",
}


def sequence_color(seq: int) -> str:
    return _SEQUENCES[seq % len(_SEQUENCES)]


def tier_color(tier: str) -> str:
    return _TIERS.get(tier, _TIERS["none"])


def color(style: str) -> str | None:
    """The colour of a style of text.py as #rrggbb; None for one that has none."""
    if style.startswith("seq"):
        return sequence_color(int(style[3:]))
    if style.startswith("tier:"):
        return tier_color(style[5:])
    return {"shared": SHARED, "kept": KEPT}.get(style)


def rich_style(style: str) -> str:
    """The same for rich."""
    if style in ("dim", "title", "shared"):
        return {"dim": "dim", "title": "bold", "shared": "bold reverse"}[style]
    return color(style) or ("dim" if style == "free" else "")


def sgr(style: str) -> str:
    """The parameters of the escape code that sets a style; "" for none."""
    if style in ("dim", "free", "title", "shared"):
        return {"dim": "2", "free": "2", "title": "1", "shared": "1;7"}[style]
    found = color(style)
    if found is None:
        return ""
    red, green, blue = (int(found[i : i + 2], 16) for i in (1, 3, 5))
    return f"38;2;{red};{green};{blue}"
