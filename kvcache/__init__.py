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

__all__ = [
    "Batch",
    "Cache",
    "CacheFullError",
    "CausalCache",
    "ChunkedCache",
    "ClosedError",
    "InvalidBatchError",
    "InvalidRangeError",
    "InvalidSequenceError",
    "KVCacheError",
    "Mask",
    "NotSupportedError",
    "OrderError",
    "SequenceLostError",
    "ShiftFunction",
    "SlidingWindowCache",
]
