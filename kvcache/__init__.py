"""KV caches of an inference engine, written once against the protocols of ``ml``.

What is named here is imported when it is first asked for: ``import kvcache`` itself brings no other package,
and a loop with one cache does not bring the rest of them. Raises ImportError where another ``ml`` hides ours.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from ml_kvcache import hidden as _hidden

if _reason := _hidden("ml"):
    raise ImportError(f"kvcache: {_reason}", name="ml")

TYPE_CHECKING = False  # typing's, without the cost of importing typing
if TYPE_CHECKING:
    from typing import Any

    from kvcache.cache import (
        Batch,
        Cache,
        CacheDType,
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
        StorageFormat,
    )
    from kvcache.caches.causal import CausalCache
    from kvcache.caches.encoder import EncoderCache
    from kvcache.caches.recurrent import RecurrentCache
    from kvcache.caches.states import StateCache
    from kvcache.caches.windows import ChunkedCache, SlidingWindowCache
    from kvcache.caches.wrapper import WrapperCache
    from kvcache.prefix.break_even import BreakEven
    from kvcache.prefix.eviction_queue import TenantBudget
    from kvcache.prefix.prefix_cache import (
        PrefixCache,
        PrefixStats,
        Session,
        SessionLimitError,
        SessionReplacedError,
    )
    from kvcache.prefix.retention import Retention
    from kvcache.prefix.tiers import HostTier
    from kvcache.snapshots.serialize import deserialize, serialize
    from kvcache.snapshots.snapshot import (
        AttentionSnapshot,
        EncoderSnapshot,
        Snapshot,
        StateSnapshot,
        WrapperSnapshot,
    )
    from kvcache.storage.state_specs import StateSpec

__all__ = [
    "AttentionSnapshot",
    "Batch",
    "BreakEven",
    "Cache",
    "CacheDType",
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
    "Retention",
    "SequenceLostError",
    "Session",
    "SessionLimitError",
    "SessionReplacedError",
    "ShiftFunction",
    "SlidingWindowCache",
    "Snapshot",
    "StateCache",
    "StateSnapshot",
    "StateSpec",
    "StorageFormat",
    "TenantBudget",
    "WrapperCache",
    "WrapperSnapshot",
    "deserialize",
    "serialize",
]

_ELSEWHERE = {
    "AttentionSnapshot": "snapshots.snapshot",
    "BreakEven": "prefix.break_even",
    "CausalCache": "caches.causal",
    "ChunkedCache": "caches.windows",
    "EncoderCache": "caches.encoder",
    "EncoderSnapshot": "snapshots.snapshot",
    "HostTier": "prefix.tiers",
    "PrefixCache": "prefix.prefix_cache",
    "PrefixStats": "prefix.prefix_cache",
    "RecurrentCache": "caches.recurrent",
    "Retention": "prefix.retention",
    "Session": "prefix.prefix_cache",
    "SessionLimitError": "prefix.prefix_cache",
    "SessionReplacedError": "prefix.prefix_cache",
    "SlidingWindowCache": "caches.windows",
    "Snapshot": "snapshots.snapshot",
    "StateCache": "caches.states",
    "StateSnapshot": "snapshots.snapshot",
    "StateSpec": "storage.state_specs",
    "TenantBudget": "prefix.eviction_queue",
    "WrapperCache": "caches.wrapper",
    "WrapperSnapshot": "snapshots.snapshot",
    "deserialize": "snapshots.serialize",
    "serialize": "snapshots.serialize",
}
"""The modules of the names that are not in kvcache.cache."""


def __getattr__(name: str) -> Any:
    import importlib
    from importlib.util import find_spec

    if name == "__version__":
        from importlib.metadata import version

        return version("ml-kvcache")
    if name in __all__:
        module = importlib.import_module(f"kvcache.{_ELSEWHERE.get(name, 'cache')}")
        found = globals()[name] = getattr(module, name)
        return found
    if not name.startswith("_") and find_spec(f"kvcache.{name}") is not None:
        return importlib.import_module(f"kvcache.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"TYPE_CHECKING", "annotations"})
