"""KV caches for inference engines, written once against the protocols of ``ml``.

Every name is imported on first use: ``import kvcache`` itself imports no other package, and a program that
uses one cache does not import the others. Raises ImportError if another package named ``ml`` hides this
one's.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from ml_kvcache import hidden as _hidden

if _reason := _hidden("ml"):
    raise ImportError(f"kvcache: {_reason}", name="ml")

TYPE_CHECKING = False  # typing's, without the cost of importing typing
if TYPE_CHECKING:
    from typing import Any

    from kvcache.attention.dense_batch import DenseBatch
    from kvcache.attention.layer_cells import LayerCells
    from kvcache.attention.pass_reads import PassReads
    from kvcache.attention.step_reads import StepReads
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
    from kvcache.caches import branches
    from kvcache.caches.causal import CausalCache
    from kvcache.caches.compressed import CompressedCache
    from kvcache.caches.encoder import EncoderCache
    from kvcache.caches.recurrent import RecurrentCache
    from kvcache.caches.states import StateCache
    from kvcache.caches.turns import Turns, in_turn
    from kvcache.caches.windows import ChunkedCache, SlidingWindowCache
    from kvcache.caches.wrapper import WrapperCache
    from kvcache.prefix.agent_sessions import AgentSession, AgentSessions
    from kvcache.prefix.alphabet import Tenant
    from kvcache.prefix.break_even import BreakEven
    from kvcache.prefix.eviction_queue import TenantBudget
    from kvcache.prefix.options import PrefixOptions
    from kvcache.prefix.prefetch import Prefetch
    from kvcache.prefix.prefix_cache import (
        PrefixCache,
        PrefixStats,
        Session,
        SessionLimitError,
        SessionReplacedError,
    )
    from kvcache.prefix.radix_tree import common_length
    from kvcache.prefix.retention import Retention, TokenRange
    from kvcache.prefix.session import Lookup
    from kvcache.prefix.tiers import HostTier, StoreTier
    from kvcache.prefix.zmq_publisher import ZmqPublisher
    from kvcache.snapshots.check_serialized import check_serialized
    from kvcache.snapshots.layer_shapes import layers_of_cache
    from kvcache.snapshots.schedule import bytes_inside, thin_snapshots
    from kvcache.snapshots.serialize import deserialize, serialize
    from kvcache.snapshots.snapshot import (
        AttentionSnapshot,
        EncoderSnapshot,
        Snapshot,
        StateSnapshot,
        WrapperSnapshot,
    )
    from kvcache.storage.formats import CacheFormat, format_names, open_format
    from kvcache.storage.layer_shape import ExtraSpec, LayerShape
    from kvcache.storage.sizes import bytes_text
    from kvcache.storage.state_specs import StateSpec

__all__ = [
    "AgentSession",
    "AgentSessions",
    "AttentionSnapshot",
    "Batch",
    "BreakEven",
    "Cache",
    "CacheDType",
    "CacheFormat",
    "CacheFullError",
    "CausalCache",
    "ChunkedCache",
    "ClosedError",
    "CompressedCache",
    "DenseBatch",
    "EncoderCache",
    "EncoderSnapshot",
    "ExtraSpec",
    "HostTier",
    "InvalidBatchError",
    "InvalidRangeError",
    "InvalidSequenceError",
    "KVCacheError",
    "LayerCells",
    "LayerShape",
    "Lookup",
    "Mask",
    "NotSupportedError",
    "OrderError",
    "PassReads",
    "Prefetch",
    "PrefixCache",
    "PrefixOptions",
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
    "StepReads",
    "StorageFormat",
    "StoreTier",
    "Tenant",
    "TenantBudget",
    "TokenRange",
    "Turns",
    "WrapperCache",
    "WrapperSnapshot",
    "ZmqPublisher",
    "branches",
    "bytes_inside",
    "bytes_text",
    "check_serialized",
    "common_length",
    "deserialize",
    "format_names",
    "in_turn",
    "layers_of_cache",
    "open_format",
    "serialize",
    "thin_snapshots",
]

_ELSEWHERE = {
    "AgentSession": "prefix.agent_sessions",
    "AgentSessions": "prefix.agent_sessions",
    "AttentionSnapshot": "snapshots.snapshot",
    "BreakEven": "prefix.break_even",
    "CacheFormat": "storage.formats",
    "CausalCache": "caches.causal",
    "ChunkedCache": "caches.windows",
    "CompressedCache": "caches.compressed",
    "DenseBatch": "attention.dense_batch",
    "EncoderCache": "caches.encoder",
    "EncoderSnapshot": "snapshots.snapshot",
    "ExtraSpec": "storage.layer_shape",
    "HostTier": "prefix.tiers",
    "LayerCells": "attention.layer_cells",
    "LayerShape": "storage.layer_shape",
    "Lookup": "prefix.session",
    "PassReads": "attention.pass_reads",
    "Prefetch": "prefix.prefetch",
    "PrefixCache": "prefix.prefix_cache",
    "PrefixOptions": "prefix.options",
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
    "StepReads": "attention.step_reads",
    "StoreTier": "prefix.tiers",
    "Tenant": "prefix.alphabet",
    "TenantBudget": "prefix.eviction_queue",
    "TokenRange": "prefix.retention",
    "Turns": "caches.turns",
    "WrapperCache": "caches.wrapper",
    "WrapperSnapshot": "snapshots.snapshot",
    "ZmqPublisher": "prefix.zmq_publisher",
    "bytes_inside": "snapshots.schedule",
    "bytes_text": "storage.sizes",
    "check_serialized": "snapshots.check_serialized",
    "common_length": "prefix.radix_tree",
    "deserialize": "snapshots.serialize",
    "format_names": "storage.formats",
    "in_turn": "caches.turns",
    "layers_of_cache": "snapshots.layer_shapes",
    "open_format": "storage.formats",
    "serialize": "snapshots.serialize",
    "thin_snapshots": "snapshots.schedule",
}
"""The module of each name that is not in kvcache.cache."""


def __getattr__(name: str) -> Any:
    import importlib
    from importlib.util import find_spec

    if name == "__version__":
        from importlib.metadata import version

        return version("ml-kvcache")
    if name == "branches":
        return importlib.import_module("kvcache.caches.branches")
    if name in __all__:
        module = importlib.import_module(f"kvcache.{_ELSEWHERE.get(name, 'cache')}")
        member = globals()[name] = getattr(module, name)
        return member
    if not name.startswith("_") and find_spec(f"kvcache.{name}") is not None:
        return importlib.import_module(f"kvcache.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"TYPE_CHECKING", "annotations"})
