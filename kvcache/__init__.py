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
from kvcache.recurrent import RecurrentCache
from kvcache.snapshots import AttentionSnapshot, RecurrentSnapshot
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
    "InvalidBatchError",
    "InvalidRangeError",
    "InvalidSequenceError",
    "KVCacheError",
    "Mask",
    "NotSupportedError",
    "OrderError",
    "RecurrentCache",
    "RecurrentSnapshot",
    "SequenceLostError",
    "ShiftFunction",
    "SlidingWindowCache",
    "WrapperCache",
]
