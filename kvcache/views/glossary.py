"""What the words of a picture mean, for who has not read the docs."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["WORDS", "used"]

WORDS: Mapping[str, str] = {
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
    "pinned": "evicted last",
    "leaves first": "what the device would evict next",
    "found there": "tokens of a prompt that did not have to be computed",
    "state": "the fixed-size memory of a recurrent layer",
    "checkpoint": "a copy of a state that a sequence can go back to",
}  # fmt: skip


def used(text: str) -> dict[str, str]:
    """The words that ``text`` has, with their meanings; a plural counts."""
    return {word: told for word, told in WORDS.items() if re.search(rf"\b{word}s?\b", text, re.IGNORECASE)}
