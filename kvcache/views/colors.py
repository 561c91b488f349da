"""One palette for all drawings: sequences in colours that people with colour blindness tell apart."""

from __future__ import annotations

__all__ = ["FREE", "KEPT", "SHARED", "rich_style", "sequence_color", "tier_color"]

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


_STYLES = {"dim": "dim", "free": "dim", "title": "bold", "shared": "bold reverse", "kept": KEPT}


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
