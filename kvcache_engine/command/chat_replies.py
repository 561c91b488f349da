"""Replies to lines of ``kvcache chat``: as text for people, and as records for programs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvcache import bytes_text
from kvcache.views.words import counted
from kvcache_engine.command.json_output import statistics_record
from kvcache_engine.conversations import Conversation
from kvcache_engine.engine import Engine

__all__ = ["Reply", "aligned", "conversation_records", "conversation_rows", "engine_record",
           "engine_rows"]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reply:
    """``text`` is None if it has been shown already."""

    text: str | None
    record: dict[str, Any] = field(default_factory=dict)


def conversation_rows(conversations: Iterable[Conversation], current: Conversation) -> list[tuple[str, str]]:
    """The list of conversations, with the current one marked."""
    return [
        (f"{'*' if each is current else ' '} {each.name}", counted(len(each.tokens), "token"))
        for each in conversations
    ]


def conversation_records(
    conversations: Iterable[Conversation], current: Conversation
) -> list[dict[str, Any]]:
    return [
        {"name": each.name, "tokens": len(each.tokens), "current": each is current} for each in conversations
    ]


def engine_rows(engine: Engine) -> list[tuple[str, str]]:
    """The numbers of computed, reused and kept tokens."""
    totals, reused = engine.statistics, engine.prefix.stats
    shown = ", ".join(f"{name} {count}" for name, count in _origins(engine).items() if count)
    kept = ", ".join(f"{name} {bytes_text(size)}" for name, size in engine.prefix.nbytes.items())
    return [
        ("tokens reused", f"{reused.reused}{f' ({shown})' if shown else ''}"),
        ("tokens computed", str(totals.computed_tokens)),
        ("tokens generated", str(totals.generated_tokens)),
        ("decode", f"{totals.decode_tokens_per_second:.1f} tokens/s"),
        ("kept", kept),
        ("cache", bytes_text(engine.cache_bytes)),
    ]


def engine_record(engine: Engine) -> dict[str, Any]:
    """The same figures; ``kept`` is in bytes."""
    return {
        "statistics": statistics_record(engine.statistics, engine.cache_bytes),
        "reused": _origins(engine),
        "kept": dict(engine.prefix.nbytes),
    }


def _origins(engine: Engine) -> dict[str, int]:
    """The origins of tokens that were not computed."""
    stats = engine.prefix.stats
    return {"live": stats.live, "device": stats.device, "host": stats.host, "store": stats.store}


def aligned(rows: list[tuple[str, str]], width: int | None = None) -> str:
    """Names on the left and values on the right, wrapped to ``width`` columns."""
    left = max(len(name) for name, _ in rows) + 2
    if width is None or width < 2 * left:
        return "\n".join(f"{name:<{left}}{value}" for name, value in rows)
    lines = []
    for name, value in rows:
        first, *more = textwrap.wrap(value, width - left) or [""]
        lines += [f"{name:<{left}}{first}", *(" " * left + line for line in more)]
    return "\n".join(lines)
