"""KV caches of an inference engine, written once against the protocols of ``ml``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvcache.cache import (
    Batch,
    Cache,
    CacheFullError,
    ClosedError,
    InvalidBatchError,
    InvalidRangeError,
    InvalidSequenceError,
    KVCacheError,
    Mask,
    NotSupportedError,
    OrderError,
    SequenceLostError,
    ShiftFunction,
)
from kvcache.causal import CausalCache, ChunkedCache, SlidingWindowCache
from kvcache.snapshots import (
    AttentionSnapshot,
    EncoderSnapshot,
    RecurrentSnapshot,
    Snapshot,
    WrapperSnapshot,
)

if TYPE_CHECKING:
    from kvcache.encoder import EncoderCache
    from kvcache.paging import from_page, to_page
    from kvcache.prefix import PrefixCache, PrefixStats, Session, SessionLimitError, SessionReplacedError
    from kvcache.recurrent import RecurrentCache
    from kvcache.tiers import HostTier
    from kvcache.wrapper import WrapperCache

__all__ = [
    "AttentionSnapshot",
    "Batch",
    "Cache",
    "CacheFullError",
    "CausalCache",
    "ChunkedCache",
    "ClosedError",
    "EncoderCache",
    "EncoderSnapshot",
    "HostTier",
    "InvalidBatchError",
    "InvalidRangeError",
    "InvalidSequenceError",
    "KVCacheError",
    "Mask",
    "NotSupportedError",
    "OrderError",
    "PrefixCache",
    "PrefixStats",
    "RecurrentCache",
    "RecurrentSnapshot",
    "SequenceLostError",
    "Session",
    "SessionLimitError",
    "SessionReplacedError",
    "ShiftFunction",
    "SlidingWindowCache",
    "Snapshot",
    "WrapperCache",
    "WrapperSnapshot",
    "from_page",
    "to_page",
]

_LATER = {
    "EncoderCache": "kvcache.encoder",
    "HostTier": "kvcache.tiers",
    "PrefixCache": "kvcache.prefix",
    "PrefixStats": "kvcache.prefix",
    "RecurrentCache": "kvcache.recurrent",
    "Session": "kvcache.prefix",
    "SessionLimitError": "kvcache.prefix",
    "SessionReplacedError": "kvcache.prefix",
    "WrapperCache": "kvcache.wrapper",
    "from_page": "kvcache.paging",
    "to_page": "kvcache.paging",
}
"""What is imported when it is first asked for: a loop with a cache alone needs none of it."""


def __getattr__(name: str) -> Any:
    if name in _LATER:
        found = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
