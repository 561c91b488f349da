"""Words and numbers as people read them, and foreign text made safe to show."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]
"""Token ids to their text; ``Tokenizer.decode`` is one."""

HEAD = 64
"""Tokens that ``preview`` wants to be given, where there are as many."""
_PREVIEWED = 48
"""Tokens that are decoded to show how they begin."""
_WIDTH = 48


def printable(text: str) -> str:
    """``text`` on one line, with every character that does not print (escapes, controls) written out."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text
    )


def preview(items: Sequence[int | bytes], decode: Decode | None, width: int = _WIDTH) -> str:
    """How a run of tokens begins: their text, or their ids; "…" where there is more."""
    head = items[:_PREVIEWED]
    text = printable(_ids(head) if decode is None else _decoded(head, decode))
    if len(text) > width:
        return text[: width - 1] + "…"
    return text + ("…" if len(items) > len(head) else "")


def _ids(items: Sequence[int | bytes]) -> str:
    return " ".join(_named(item) if isinstance(item, bytes) else str(item) for item in items)


def _decoded(items: Sequence[int | bytes], decode: Decode) -> str:
    parts: list[str] = []
    run: list[int] = []
    for item in items:
        if not isinstance(item, bytes):
            run.append(item)
            continue
        parts.append(decode(run) if run else "")
        parts.append(_named(item))
        run = []
    parts.append(decode(run) if run else "")
    return "".join(parts)


def _named(item: bytes) -> str:
    """An item that is no token id, an image's digest, say."""
    return f"<item {item[:4].hex()}>"


def age_text(seconds: float) -> str:
    """90 -> '1 min'."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"


def counted(count: int, word: str) -> str:
    """'1 token', '2 tokens', '3 entries'."""
    if count == 1:
        return f"1 {word}"
    return f"{count:,} {word[:-1]}ies" if word.endswith("ry") else f"{count:,} {word}s"
