"""Pictures of caches: which sequence holds which cell, the prefix tree, masks, and occupancy over time.

::

    print(views.render(cache))                   # text; rich, notebooks and .html show it in colours
    views.render(prefix, tokenizer.decode).save("prefix.html")
    print(views.look_at_mask(cache))             # of the pass under way
    occupancy = views.Occupancy(cache)           # occupancy.sample() once a step
    views.plots.occupancy(occupancy.samples)     # matplotlib: pip install 'ml-kvcache[plots]'

Pictures have no side effects on eviction order, snapshots or tensors. In a notebook, ``%load_ext
kvcache.views`` displays caches as pictures.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvcache.views.blocks import CellMap
from kvcache.views.pictures import (
    CachePicture,
    MaskPicture,
    PagePicture,
    Picture,
    PrefixPicture,
    StorePicture,
)

if TYPE_CHECKING:
    from kvcache.views import plots
    from kvcache.views.caches import look_at_mask
    from kvcache.views.disk import look_at_page, look_at_store
    from kvcache.views.plots import Occupancy
    from kvcache.views.rendering import render
    from kvcache.views.terminal import Watched

__all__ = [
    "CachePicture", "CellMap", "MaskPicture", "Occupancy", "PagePicture", "Picture", "PrefixPicture",
    "StorePicture", "Watched", "look_at_mask", "look_at_page", "look_at_store", "plots", "render",
]  # fmt: skip

_LATER = {
    "Occupancy": "plots",
    "Watched": "terminal",
    "look_at_mask": "caches",
    "look_at_page": "disk",
    "look_at_store": "disk",
    "render": "rendering",
}
"""Names that are imported on first use."""


def __getattr__(name: str) -> Any:
    if name == "plots":
        return importlib.import_module("kvcache.views.plots")
    if name in _LATER:
        return getattr(importlib.import_module(f"kvcache.views.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext kvcache.views``"""
    importlib.import_module("kvcache.views.rendering").register(shell)


def unload_ipython_extension(shell: Any) -> None:
    """``%unload_ext kvcache.views``"""
    importlib.import_module("kvcache.views.rendering").unregister(shell)
