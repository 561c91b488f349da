"""The identity of a model, which names snapshots that outlive the process."""

from __future__ import annotations

from typing import Any

from kvcache.stores import identity_of
from kvcache_engine.errors import ModelError

__all__ = ["model_identity"]


def model_identity(model: Any) -> dict[str, str]:
    """JSON-able: ``kvcache.stores.identity_of`` the files that ``model`` was loaded from, in its dtype.

    For a model split over ranks it includes the rank and their number, as each rank has keys and values of
    its own heads. It also includes whether the layer for multi-token prediction stores its own. All weights
    are read once.

    A model's own ``identity()`` takes precedence. Raises ModelError for any other model that was not loaded
    from files: pass an identity yourself then.
    """
    own = getattr(model, "identity", None)
    if own is not None:
        own_identity: dict[str, str] = own()
        return own_identity
    origin = getattr(model, "origin", None)
    if origin is None:
        raise ModelError(
            f"{type(model).__name__} was not loaded from files, so that it cannot be identified; pass "
            "identity="
        )
    identity = identity_of(origin, model.dtype)
    if (share := getattr(model, "share", None)) is not None:
        identity["tensor_parallel"] = share.name
    if getattr(model, "mtp", None) is not None:
        identity["mtp"] = "yes"
    return identity
