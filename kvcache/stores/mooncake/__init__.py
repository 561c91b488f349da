"""Snapshots in the memory of other hosts, pooled by Mooncake Store. Needs the extra ``[mooncake]``."""

from __future__ import annotations

from kvcache.stores.mooncake.options import MooncakeOptions
from kvcache.stores.mooncake.store import MooncakeStore

__all__ = ["MooncakeOptions", "MooncakeStore"]
