"""Caches as pictures in a notebook, after ``%load_ext kvcache.views``."""

from __future__ import annotations

from typing import Any

from kvcache.cache import ClosedError, OrderError
from kvcache.caches.causal import CausalCache
from kvcache.caches.encoder import EncoderCache
from kvcache.caches.recurrent import RecurrentCache
from kvcache.caches.wrapper import WrapperCache
from kvcache.prefix.prefix_cache import PrefixCache
from kvcache.views import html
from kvcache.views.pictures import Picture
from kvcache.views.rendering import render

__all__ = ["register", "unregister"]

_SHOWN = (CausalCache, EncoderCache, RecurrentCache, WrapperCache, PrefixCache)


def register(shell: Any) -> None:
    """Let an IPython shell show caches and prefix caches as HTML; their subclasses too."""
    for kind in _SHOWN:
        shell.display_formatter.formatters["text/html"].for_type(kind, _picture)


def unregister(shell: Any) -> None:
    for kind in _SHOWN:
        shell.display_formatter.formatters["text/html"].pop(kind, None)


def _picture(cache: Any) -> str | None:
    """None where there is nothing to draw (before ``init``, after ``close``): IPython shows the repr then."""
    try:
        picture: Picture = render(cache)
    except (OrderError, ClosedError):
        return None
    return html.fragment(list(picture.blocks()))
