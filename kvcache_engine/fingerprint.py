"""Which model computed keys and values: what snapshots that outlive the process are named by."""

from __future__ import annotations

from typing import Any

from kvcache.stores import identity_of
from kvcache_engine.errors import ModelError

__all__ = ["model_identity"]


def model_identity(model: Any) -> dict[str, str]:
    """JSON-able: ``kvcache.stores.identity_of`` the files that ``model`` was loaded from, in its dtype.

    Of a model that is split over ranks, the rank and their number are in it too: each has keys and values of
    its own heads. So is whether the layer for multi-token prediction stores its own. Reads all weights once.

    A model that has an ``identity()`` of its own is asked. Raises ModelError for another one that was not
    loaded from files: name it yourself then.
    """
    own = getattr(model, "identity", None)
    if own is not None:
        told: dict[str, str] = own()
        return told
    origin = getattr(model, "origin", None)
    if origin is None:
        raise ModelError(
            f"{type(model).__name__} was not loaded from files, so that nothing tells it from others; "
            "pass identity="
        )
    found = identity_of(origin, model.dtype)
    if (share := getattr(model, "share", None)) is not None:
        found["tensor_parallel"] = share.name
    if getattr(model, "mtp", None) is not None:
        found["mtp"] = "yes"
    return found
