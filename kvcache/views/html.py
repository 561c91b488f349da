"""Blocks as a page of HTML that needs nothing but itself: inline SVG and tables, no script, no link."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence

from kvcache.views.blocks import Block, Facts, Table, Tiers, tabled
from kvcache.views.colors import DARK, INK, LINE, PAPER, PENCIL
from kvcache.views.svg import document

_STYLE = (
    ":root{color-scheme:light dark}body{margin:24px auto;max-width:980px;padding:0 12px;"
    f"background:{PAPER};color:{INK};font:14px/1.5 system-ui,-apple-system,'Segoe UI',sans-serif}}"
    f"svg{{max-width:100%;height:auto;border:1px solid {LINE};border-radius:6px}}"
    "table{border-collapse:collapse;margin:12px 0;font-size:13px}caption{text-align:left;font-weight:600}"
    f"th,td{{text-align:left;padding:3px 14px 3px 0;border-bottom:1px solid {LINE};overflow-wrap:anywhere}}"
    "h2{font-size:14px;margin:24px 0 4px}dl{display:grid;grid-template-columns:max-content 1fr;"
    "gap:2px 14px;font-size:13px}dd{margin:0}"
    f"th,dt{{color:{PENCIL};font-weight:500}}td{{font-variant-numeric:tabular-nums}}"
    f"@media(prefers-color-scheme:dark){{body{{background:{DARK[PAPER]};color:{DARK[INK]}}}"
    f"svg,th,td{{border-color:{DARK[LINE]}}}th,dt{{color:{DARK[PENCIL]}}}}}"
)
_WORDS: Mapping[str, str] = {
    "cell": "room for one token's keys and values, in every layer",
    "sequence": "a row of tokens that the cache keeps apart from others: a conversation, a beam",
    "position": "the index of a token in its sequence, from 0",
    "shared": "held by several sequences at once; nothing was copied",
    "run": "contiguous cells of a sequence, which are read without a gather",
    "gathered": "read cell by cell, since the cells are not contiguous",
    "hole": "free cells with used ones after them",
    "a step reads": "what every layer reads to decode one token of each sequence",
    "once for several": "cells that are read once for all the sequences that share them",
    "next token sees": "how many tokens the next one attends to, itself included",
    "snapshot": "what a sequence held up to some position, kept after the sequence continued or ended",
    "kept by snapshots": "no longer held by a sequence; freed when space runs out",
    "prefix tree": "a radix tree of the beginnings of conversations; a new one starts from the longest "
    "prefix in it",
    "node": "a run of tokens in the prefix tree, and where its keys and values are stored",
    "tier": "a place for snapshots: the cache's own cells, host memory, a store",
    "leaves first": "what the device would evict next",
    "found there": "tokens of a prompt that did not have to be computed",
    "state": "the fixed-size memory of a recurrent layer",
    "checkpoint": "a copy of a state that a sequence can go back to",
}  # fmt: skip
"""What the words of a picture mean, for who has not read the docs."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(blocks: Sequence[Block], title: str) -> str:
    """A whole document. What tokens, keys or paths say is escaped, and nothing may be loaded or run."""
    name = html.escape(title)
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{name}</title><style>{_STYLE}</style>"
    )
    drawn = fragment(blocks)
    body = f"<h1>{name}</h1>\n{drawn}{_glossary(drawn)}"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'


def fragment(blocks: Sequence[Block]) -> str:
    """The drawing and its tables, for a page or a notebook."""
    return document(blocks) + "\n".join(map(_table, blocks)) + "\n"


def _glossary(drawn: str) -> str:
    """The words that a reader sees, with their meanings; a plural counts."""
    seen = html.unescape(re.sub(r"<[^>]*>", " ", drawn))
    terms = "".join(
        f"<dt>{word}</dt><dd>{html.escape(meaning)}</dd>"
        for word, meaning in _WORDS.items()
        if re.search(rf"\b{word}s?\b", seen, re.IGNORECASE)
    )
    return f"<h2>Glossary</h2>\n<dl>{terms}</dl>\n" if terms else ""


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
