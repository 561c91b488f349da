"""Blocks as a page of HTML that needs nothing but itself: inline SVG and tables, no script, no link."""

from __future__ import annotations

import html
from collections.abc import Sequence

from kvcache.views.blocks import Block, Facts, Table, Tiers, tabled
from kvcache.views.svg import document

__all__ = ["fragment", "page"]

_STYLE = (
    ":root{color-scheme:light}body{margin:24px auto;max-width:980px;padding:0 12px;background:#fff;"
    "color:#1b1f24;font:14px/1.5 system-ui,-apple-system,'Segoe UI',sans-serif}"
    "svg{max-width:100%;height:auto;border:1px solid #e3e6ea;border-radius:6px}"
    "table{border-collapse:collapse;margin:12px 0;font-size:13px}caption{text-align:left;font-weight:600}"
    "th,td{text-align:left;padding:3px 14px 3px 0;border-bottom:1px solid #e3e6ea;overflow-wrap:anywhere}"
    "th{color:#656d76;font-weight:500}td{font-variant-numeric:tabular-nums}"
)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(blocks: Sequence[Block], title: str) -> str:
    """A whole document. What tokens, keys or paths say is escaped, and nothing may be loaded or run."""
    name = html.escape(title)
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{name}</title><style>{_STYLE}</style>"
    )
    body = f"<h1>{name}</h1>\n{fragment(blocks)}"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'


def fragment(blocks: Sequence[Block]) -> str:
    """The drawing and its tables, for a page or a notebook."""
    return document(blocks) + "\n".join(map(_table, blocks)) + "\n"


def _table(block: Block) -> str:
    if isinstance(block, Tiers):
        block = tabled("tiers", ("tier",), [(words,) for _, words in block.tiers])
    elif isinstance(block, Facts):
        block = tabled("meta", ("name", "value"), block.rows)
    if not isinstance(block, Table) or not block.rows or "html" not in block.forms:
        return ""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in block.head)
    rows = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>\n" for row in block.rows
    )
    more = f"<p>... {block.more:,} more</p>" if block.more else ""
    caption = html.escape(block.caption[:1].upper() + block.caption[1:])
    return f"<table><caption>{caption}</caption>\n<tr>{head}</tr>\n{rows}</table>{more}"
