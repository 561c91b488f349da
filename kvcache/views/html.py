"""Pictures as a page of HTML that needs nothing but itself: inline SVG and tables, no script, no link."""

from __future__ import annotations

import html
from collections.abc import Iterator

from kvcache.views.data import (
    CacheData,
    CellMap,
    EncoderView,
    PageData,
    Part,
    PictureData,
    PrefixData,
    StatesView,
    StoreData,
)
from kvcache.views.summaries import (
    LISTED,
    Table,
    encoder_table,
    node_facts,
    sequence_table,
    session_table,
    states_table,
    tabled,
    tier_text,
)
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


def page(picture: PictureData, title: str = "") -> str:
    """A whole document. What tokens, keys or paths say is escaped, and nothing may be loaded or run."""
    name = html.escape(title or _title(picture))
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{name}</title><style>{_STYLE}</style>"
    )
    body = f"<h1>{name}</h1>\n{fragment(picture)}"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'


def fragment(picture: PictureData) -> str:
    """The drawing and its tables, for a page or a notebook."""
    tables = "\n".join(_table(caption, table) for caption, table in _tables(picture) if table.rows)
    return f"{document(picture)}{tables}\n"


def _title(picture: PictureData) -> str:
    if isinstance(picture, PrefixData):
        return "Prefix cache"
    if isinstance(picture, StoreData | PageData):
        return picture.name
    return str(getattr(picture, "name", "Cache"))


def _tables(picture: PictureData) -> Iterator[tuple[str, Table]]:
    if isinstance(picture, PrefixData):
        yield "Tiers", tabled(("tier",), [(tier_text(tier),) for tier in picture.tiers], [""] * LISTED)
        yield "Open sessions", session_table(picture)
        yield "Nodes", _nodes(picture)
        yield from _tables(picture.cache)
    elif isinstance(picture, CacheData):
        for part in picture.parts:
            yield from _part(part)
    elif isinstance(picture, PageData) and picture.facts:
        yield "Meta", tabled(("name", "value"), list(picture.facts), [""] * LISTED)


def _part(part: Part) -> Iterator[tuple[str, Table]]:
    if isinstance(part, CellMap):
        yield f"{part.name}: sequences", sequence_table(part)
    elif isinstance(part, StatesView):
        yield part.name, states_table(part)
    elif isinstance(part, EncoderView):
        yield part.name, encoder_table(part)


def _nodes(picture: PrefixData) -> Table:
    """Every node with all that is known of it, in the order of the drawing."""
    rows = [
        (" ".join([*("·" * node.depth)]) + f" {node.text}", "+".join(node.tiers), ", ".join(node_facts(node)))
        for node in picture.nodes
    ]
    return tabled(("begins", "tier", "facts"), rows, [f"tier:{node.tier}" for node in picture.nodes])


def _table(caption: str, table: Table) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in table.head)
    rows = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>\n" for row in table.rows
    )
    more = f"<p>... {table.more:,} more</p>" if table.more else ""
    return f"<table><caption>{html.escape(caption)}</caption>\n<tr>{head}</tr>\n{rows}</table>{more}"
