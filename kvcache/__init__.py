"""KV caches of an inference engine, written once against the protocols of ``ml``."""

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
from kvcache.encoder import EncoderCache
from kvcache.paging import from_page, to_page
from kvcache.prefix import PrefixCache, PrefixStats, Session, SessionLimitError
from kvcache.recurrent import RecurrentCache
from kvcache.snapshots import (
    AttentionSnapshot,
    EncoderSnapshot,
    RecurrentSnapshot,
    Snapshot,
    WrapperSnapshot,
)
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
    "ShiftFunction",
    "SlidingWindowCache",
    "Snapshot",
    "WrapperCache",
    "WrapperSnapshot",
    "from_page",
    "to_page",
]
