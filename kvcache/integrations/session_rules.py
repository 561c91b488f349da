"""What the caches of runtimes check alike: names of options, and what a conversation's model is given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from kvcache.cache import NotSupportedError, OrderError

__all__ = ["MOST_DRAFTS", "check_missing", "check_tiers", "names_of", "unknown_option"]

MOST_DRAFTS = 64
"""Drafted tokens behind the last one of a prompt that are taken for drafts."""


def names_of(*inits: Callable[..., Any]) -> list[str]:
    """The options of constructors: the parameters behind their first two, ``**options`` left out."""
    found = [list(inspect.signature(init).parameters.values())[2:] for init in inits]
    return [one.name for each in found for one in each if one.kind is not one.VAR_KEYWORD]


def unknown_option(
    op: str, options: Collection[str], known: Collection[str], theirs: Mapping[str, str] | None = None
) -> str | None:
    """What is to be said of the first option that is not known; ``theirs``: a runtime's, by our names."""
    for name in options:
        if name not in known:
            other = (theirs or {}).get(name)
            remedy = f"it is called {other} here" if other in known else f"known: {', '.join(known)}"
            return f"{op}: no option {name!r}; {remedy}"
    return None


def check_tiers(op: str, ranks: int, tiers: object) -> None:
    """Refuse tiers of a model that its runtime has split over ranks: NotSupportedError.

    Each rank has other heads under the same keys, and a tier may give one of them more than another.
    """
    if ranks > 1 and tiers:
        raise NotSupportedError(
            f"{op}: tiers= of a model split over {ranks} ranks, whose heads differ under the same keys; "
            "leave tiers= out, or use kvcache.runner.Engine on a model loaded with group="
        )


def check_missing(op: str, prompt: int, held: int, count: int) -> None:
    """Refuse a pass over tokens that a conversation's cache has already: OrderError.

    The conversation was begun with ``prompt`` tokens (0: not known), of which the cache has ``held``. A pass
    may end the prompt, and drafts may follow its last token.
    """
    most = MOST_DRAFTS + 1 if held == prompt - 1 else prompt - held
    if held < prompt and count > most:
        raise OrderError(
            f"{op}: {count} tokens from position {held} on, in a conversation of {prompt} tokens; give the "
            "model only what is missing, session.remaining; extend the session before a further turn"
        )
