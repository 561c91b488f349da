"""The Cache protocol, what a cache may offer beyond it, the batch it is told of, and the errors it raises.

The protocol mirrors Ollama's ``kvcache.Cache`` (kvcache/cache.go). One pass of a model is::

    cache.start_forward(ctx, batch)
    for layer in range(layers):
        cache.set_layer(layer)
        cache.put(ctx, key, value)
        out = cache.attend(ctx, query, scale)      # or: key, value, mask = cache.get(ctx)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypedDict, runtime_checkable

import numpy as np

import ml

__all__ = [
    "Batch",
    "Cache",
    "CacheDType",
    "CacheFullError",
    "ClosedError",
    "ExtraShiftFunction",
    "InvalidBatchError",
    "InvalidRangeError",
    "InvalidSequenceError",
    "KVCacheError",
    "Mask",
    "NotSupportedError",
    "OneDType",
    "OrderError",
    "PutOptions",
    "ResidualWindow",
    "SequenceLostError",
    "ShiftFunction",
    "SnapshotCache",
    "StorageFormat",
    "SupportsCells",
    "SupportsEvict",
    "SupportsExtras",
    "SupportsMark",
    "SupportsOffset",
    "SupportsParts",
    "SupportsPrepare",
    "SupportsReservation",
    "SupportsSchedule",
    "SupportsSetCausal",
    "SupportsSnapshots",
    "SupportsStates",
    "check_whole",
]

Mask = ml.Tensor | ml.CausalMask | None
"""(rows, history) of 0 and -inf; with ``elide_mask`` None (all see all) or ``ml.CAUSAL``."""

ShiftFunction = Callable[[ml.Context, int, ml.Tensor, ml.Tensor], ml.Tensor]
"""(ctx, layer, key (cells, kv_heads, head_dim), offsets I32 (cells,)) -> key of the same shape.

It re-encodes stored keys for new positions: each cell's offset is added to its position, 0 where
nothing moves. A model with rotary embeddings rotates the key by the offset.
"""


ExtraShiftFunction = Callable[[ml.Context, int, str, ml.Tensor, ml.Tensor], ml.Tensor]
"""(ctx, layer, name, extra (cells, *shape), offsets I32 (cells,)) -> extra of the same shape.

As ShiftFunction, of what ``put(extra=...)`` stores: an indexer's keys that have rotary embeddings are
rotated, and what does not depend on the position is returned as it is.
"""


class KVCacheError(ml.MLError):
    """Base of all errors raised by caches. A call that raises leaves the cache as it was."""


class CacheFullError(KVCacheError, RuntimeError):
    """A batch does not fit, even after eviction.

    ``asked`` cells were needed, ``free`` were free, ``held`` says how many each sequence holds
    (a shared cell counts for each). Removing a sequence and starting the same batch again works, unless
    ``remedy`` says otherwise.
    """

    def __init__(
        self,
        asked: int,
        free: int,
        held: Mapping[int, int],
        op: str = "start_forward",
        remedy: str = "remove a sequence or part of one, or use a larger capacity",
    ) -> None:
        self.asked = asked
        self.free = free
        self.held = dict(held)
        holders = ", ".join(f"sequence {seq}: {count}" for seq, count in self.held.items()) or "nobody"
        super().__init__(f"{op}: {asked} cells are needed and {free} are free (held by {holders}); {remedy}")


class NotSupportedError(KVCacheError, ml.NotSupportedError):
    """This cache, as it was made, cannot do that."""


class InvalidBatchError(KVCacheError, ValueError):
    """A batch that cannot be stored: negative or repeated positions, unknown sequences, ..."""


class InvalidSequenceError(InvalidBatchError):
    """A sequence id outside ``[0, max_sequences)``."""


class InvalidRangeError(KVCacheError, ValueError):
    """A range of positions, a length or a shape that means nothing."""


class OrderError(KVCacheError, RuntimeError):
    """A call out of order: before ``init``, ``put`` before ``start_forward``, ``attend`` before ``put``."""


class SequenceLostError(KVCacheError, RuntimeError):
    """Moving this sequence's data failed midway (the device, or a shift function); compute it again."""


class ClosedError(KVCacheError, ml.ClosedError):
    """The cache was closed."""


def check_whole(op: str, name: str, value: object, least: int = 0) -> None:
    """Refuse what is no whole number of at least ``least``."""
    if not isinstance(value, (int, np.integer)) or value < least:
        raise InvalidRangeError(f"{op}: {name}={value!r}; it must be a whole number of at least {least}")


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one forward pass, in any order, of one or more sequences.

    ``positions[i]`` and ``sequences[i]`` are the position and the sequence of token i. ``inputs`` are the
    model's inputs (token ids), ``outputs`` the indices whose logits are wanted (None: all), and
    ``multimodal`` pairs of (index, item) for inputs that are not tokens; caches ignore these three.
    """

    positions: Sequence[int]
    sequences: Sequence[int]
    multimodal: Sequence[Any] = field(default=())
    inputs: Any = None
    outputs: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.positions)


@runtime_checkable
class StorageFormat(Protocol):
    """What K or V of a cache is stored in: plain numbers, or codes that are made of them and read back.

    The ``dim`` numbers of a token in a KV head become **parts**, each a row of some width and dtype: codes,
    say, and their scales. Parts lie in buffers of their own, and are what snapshots hold and stores get.
    :mod:`kvcache.storage.formats` has those built in, and finds those of plugins.
    """

    @property
    def name(self) -> str:
        """As snapshots, stores, keys and the command line say it: formats of one name store the same bits."""

    def parts(self, dim: int, activations: ml.DType) -> tuple[tuple[int, ml.DType], ...]:
        """Width and dtype of each part of ``dim`` numbers that are put as ``activations``.

        Raises InvalidRangeError for a ``dim`` that this format cannot take.
        """

    def head_dim(self, width: int) -> int:
        """The ``dim`` whose first part is ``width`` wide."""

    def encode(self, ctx: ml.Context, x: ml.Tensor) -> tuple[ml.Tensor, ...]:
        """The parts (..., width) of floats x (..., dim)."""

    def decode(self, ctx: ml.Context, parts: Sequence[ml.Tensor], dim: int) -> ml.Tensor:
        """The floats (..., dim), of any float dtype, that parts (..., width) stand for.

        Parts may be strided in any way. Of zeros, which new buffers hold, it gives finite numbers.
        """

    def bound(self, x: np.ndarray, activations: ml.DType) -> np.ndarray:
        """How far each value may lie from ``x`` (..., dim), which is finite, before it is cast."""


OneDType: TypeAlias = ml.DType | StorageFormat | str
"""What K, or V, may be stored in: a dtype, a format, or the name of one."""


@dataclass(frozen=True, slots=True)
class ResidualWindow:
    """Codes of ``dtype`` for all tokens, and some tokens of each sequence as they were put besides.

    A pass reads exactly its own tokens, the ``residual_length`` before them (KIVI's residual window) and
    those at positions below ``sink_tokens`` (attention sinks); all others it reads from their codes.
    ``dtype`` is what :meth:`Cache.init` takes, with a format that is not plain numbers for K or V.
    """

    dtype: OneDType | tuple[OneDType, OneDType]
    residual_length: int = 128
    sink_tokens: int = 0


CacheDType: TypeAlias = OneDType | tuple[OneDType, OneDType] | ResidualWindow
"""What a cache may be told to store: one for both, or one for K and one for V; or codes with a window."""


@runtime_checkable
class Cache(Protocol):
    """What a model needs of a cache. Ranges of positions are half-open: ``[begin, end)``."""

    def init(
        self, backend: ml.Backend, dtype: CacheDType, max_sequences: int, capacity: int, max_batch: int
    ) -> None:
        """Bind to a backend. No tensor is allocated before the first ``put``.

        ``dtype`` is what K and V are stored in: a dtype, a :class:`StorageFormat`, the name of one, or a pair
        of these, for K and for V; a :class:`ResidualWindow` keeps some tokens exact. ``capacity`` counts
        tokens per sequence.
        """

    def set_config(self, config: ml.CacheConfig) -> None:
        """Use ``config`` instead of the backend's own; before the first ``start_forward``."""

    def close(self) -> None:
        """Drop the tensors; any later use but ``init`` raises ClosedError."""

    def start_forward(
        self, ctx: ml.Context, batch: Batch, reserve: bool = False, *, read_only: bool = False
    ) -> None:
        """Find a cell for every token of the batch, evicting what a window no longer sees.

        With ``reserve`` nothing is stored: the pass only shows shapes at their largest. With ``read_only``
        nothing is either: the batch's tokens are queries over what is stored, each up to its position.

        Raises InvalidBatchError, CacheFullError.
        """

    def set_layer(self, layer: int) -> None:
        """The layer that the next ``put``, ``get`` and ``attend`` are about."""

    def put(self, ctx: ml.Context, key: ml.Tensor, value: ml.Tensor) -> None:
        """Store (tokens, kv_heads, head_dim) and (tokens, kv_heads, v_dim), in the batch's order."""

    def get(self, ctx: ml.Context) -> tuple[ml.Tensor, ml.Tensor, Mask]:
        """(history, kv_heads, head_dim), values likewise, and the mask (tokens, history).

        The order of the history is free: mask and rows agree. The tensors alias the cache: they are
        good until the next ``start_forward``. OrderError for a layer that was not put in this pass, unless
        that only reads; ``attend`` likewise.
        """

    def attend(
        self, ctx: ml.Context, query: ml.Tensor, scale: float, sinks: ml.Tensor | None = None
    ) -> ml.Tensor:
        """Attention of (tokens, heads, head_dim) over what is stored -> (tokens, heads, v_dim)."""

    def copy_prefix(self, src_seq: int, dst_seq: int, length: int) -> None:
        """Make ``dst_seq`` share positions ``[0, length)`` of ``src_seq``; no data is copied."""

    def can_resume(self, seq: int, position: int) -> bool:
        """Whether all that a token at ``position`` would attend to is still stored."""

    def remove(self, seq: int, begin: int, end: int | None = None) -> None:
        """Forget ``[begin, end)``; what follows ``end`` moves down by ``end - begin``."""


# What a cache may offer beyond that: who needs it asks with isinstance, once.


@runtime_checkable
class SupportsPrepare(Protocol):
    """A cache whose changes can be checked before they are made, and whose start can be taken back.

    ``prepare_...`` raises what the call itself would raise, and changes nothing; the callable returned makes
    the change. Where several caches change together, all are asked before the first is touched. One that
    lacks this is asked last, and what it refuses then has touched nothing.
    """

    def prepare_remove(self, seq: int, begin: int, end: int | None = None) -> Callable[[], None]: ...
    def prepare_copy_prefix(self, src_seq: int, dst_seq: int, length: int) -> Callable[[], None]: ...
    def prepare_set_config(self, config: ml.CacheConfig) -> Callable[[], None]: ...

    def pass_under_way(self) -> object:
        """The pass that the last ``start_forward`` began; None where it is over."""

    def undo_forward(self, resume: object = None) -> None:
        """Take back the last ``start_forward``; ``resume`` is what ``pass_under_way`` gave before it."""


@runtime_checkable
class SupportsOffset(Protocol):
    """A cache that knows where its sequences stand: all but those of an encoder's output."""

    def offset(self, seq: int) -> int:
        """Where the next token of a sequence belongs; 0 for an empty one. InvalidSequenceError."""

    def resume_point(self, seq: int, position: int) -> int:
        """The last position up to ``position`` from which the sequence can go on exactly; 0: from nothing."""


@runtime_checkable
class SupportsSnapshots(Protocol):
    """A cache whose sequences can be kept and put back. A snapshot has what ``kvcache.Snapshot`` lists."""

    @property
    def nbytes(self) -> int:
        """Bytes of all that is allocated; 0 before anything is stored."""

    def settings(self) -> dict[str, object]:
        """What decides the content of a snapshot, JSON-able: caches that agree in it may share snapshots."""

    def snapshot(self, seq: int, begin: int = 0, end: int | None = None) -> Any:
        """What the sequence holds of ``[begin, end)``; None: to its end. Nothing is copied yet.

        InvalidRangeError, NotSupportedError where it is not stored, SequenceLostError.
        """

    def restore(self, seq: int, snapshot: Any, target: int | None = None) -> bool:
        """Make the sequence hold ``[0, target)``; None: to the snapshot's end.

        False, and nothing touched, where that cannot be. CacheFullError where the cells do not suffice,
        InvalidRangeError for a snapshot of another kind of cache.
        """

    def prepare_restore_snapshot(
        self, seq: int, snapshot: Any, target: int | None = None
    ) -> Callable[[], None] | None:
        """Check all that ``restore`` may refuse; None where it would give False."""

    def merge(self, parent: Any, child: Any) -> Any:
        """Join ``[a, b)`` and ``[b, c)`` to ``[a, c)``; ``parent`` None: the child."""

    def join(self, parts: Sequence[Any]) -> Any:
        """One snapshot of one or more that follow one another, in order."""

    def split(self, snapshot: Any, at: int) -> tuple[Any, Any]:
        """``[a, c)`` as ``[a, at)`` and ``[at, c)``; (None, snapshot) where it has no parts, or at ``a``."""


@runtime_checkable
class SupportsSchedule(Protocol):
    """A cache that takes snapshots by itself, at positions that are told before they are reached."""

    def schedule_snapshots(self, seq: int, positions: list[int]) -> None:
        """Take a snapshot at each of ``positions`` when the sequence reaches it.

        InvalidRangeError for one that it has reached already.
        """

    def next_snapshot(self, seq: int) -> int | None:
        """The position at which a batch of this sequence should end for the next one; None: anywhere."""

    def take_snapshots(self, seq: int, upto: int | None = None) -> list[Any]:
        """Those that were taken since the last call, by position, up to ``upto`` (None: all)."""

    def snapshots_taken(self, seq: int) -> list[Any]:
        """What ``take_snapshots`` would hand over, and still has then."""

    def skipped_snapshots(self, seq: int) -> list[int]:
        """The scheduled positions, ascending, that were reached since the last call and not taken."""

    def cancel_snapshots(self, seq: int) -> None:
        """Forget what was scheduled for a sequence, and what was taken of it and not handed over."""

    def rolled_back(self, seq: int) -> int | None:
        """The lowest position that was removed since this was last asked; None: nothing was.

        -1 where ``copy_prefix`` replaced all of it (kvcache.snapshots.schedule.REPLACED).
        """


class SnapshotCache(Cache, SupportsOffset, SupportsSnapshots, SupportsSchedule, Protocol):
    """What a PrefixCache needs of its cache."""

    on_pressure: Callable[[int], bool | None] | None
    """Called with the number of cells that are missing, before snapshots are copied out of the cache.

    It may drop or detach some, and says whether it did; it is asked again while cells are missing.
    """

    @property
    def backend(self) -> ml.Backend:
        """OrderError before ``init``, ClosedError after ``close``."""

    @property
    def max_sequences(self) -> int: ...


class PutOptions(TypedDict, total=False):
    """What else ``put`` of :class:`SupportsExtras` takes."""

    v_dim: int | None
    extra: Mapping[str, ml.Tensor] | None


@runtime_checkable
class SupportsExtras(Protocol):
    """A cache whose layers may store less than keys and values, or more, as all caches with cells do."""

    def put(
        self,
        ctx: ml.Context,
        key: ml.Tensor,
        value: ml.Tensor | None = None,
        *,
        v_dim: int | None = None,
        extra: Mapping[str, ml.Tensor] | None = None,
    ) -> None:
        """As ``Cache.put``. Without ``value`` the first ``v_dim`` numbers of the keys are the values too.

        (None: all of them.) They are stored once: the latents of multi-head latent attention (DeepSeek-AI,
        "DeepSeek-V2", 2024). ``extra`` are further tensors (tokens, ...) by name, such as the keys of an
        indexer, each stored as it is put, in its own shape and dtype. The first ``put`` fixes all of this.
        """

    def get_extra(self, ctx: ml.Context, name: str) -> ml.Tensor:
        """An extra of the layer, (history, ...), in the order of the rows of ``get``; OrderError as there."""

    def attend(
        self,
        ctx: ml.Context,
        query: ml.Tensor,
        scale: float,
        sinks: ml.Tensor | None = None,
        *,
        select: ml.Tensor | None = None,
    ) -> ml.Tensor:
        """As ``Cache.attend``. With ``select``, I32 (tokens, k), over these rows of ``get`` only.

        A query attends to those of its rows that it sees; a negative number stands for none.
        """


@runtime_checkable
class SupportsSetCausal(Protocol):
    """A cache whose mask can be lifted for some tokens."""

    def set_causal(self, ctx: ml.Context, except_: Iterable[int] = ()) -> None:
        """Let the batch's tokens at the indices ``except_`` see what comes after them too."""


@runtime_checkable
class SupportsCells(Protocol):
    """A cache whose tokens lie in cells, among those of other sequences."""

    def defrag(self) -> None:
        """Move cells so that every sequence lies in one run. The pass under way ends."""

    def mark_lost(self, seq: int) -> None:
        """Let a sequence say that it is lost wherever it is used, until it is removed."""


@runtime_checkable
class SupportsEvict(Protocol):
    """A cache that forgets tokens anywhere before the last one, as all caches with cells of tokens do."""

    def evict(self, seq: int, positions: Iterable[int]) -> None:
        """Forget these positions; those that stay keep theirs. InvalidRangeError, SequenceLostError."""

    def prepare_evict(self, seq: int, positions: Iterable[int]) -> Callable[[], None]:
        """Check all that ``evict`` may refuse; the callable returned then does it."""


@runtime_checkable
class SupportsParts(Protocol):
    """A cache that is put together from others, as WrapperCache is."""

    caches: Sequence[Any]


@runtime_checkable
class SupportsMark(Protocol):
    """A cache that goes back to a copy of its state, as RecurrentCache does."""

    def mark(self, seq: int) -> Any:
        """A copy of the sequence's state as it is now; SequenceLostError where a device failure took it."""

    def prepare_return(self, seq: int, mark: Any) -> Callable[[], None]:
        """Check all that going back to ``mark`` may refuse; the callable returned then does it.

        InvalidRangeError for a mark beyond the end of the sequence.
        """


@runtime_checkable
class SupportsStates(Protocol):
    """A cache that keeps states of positions inside a pass, where its model delivers them."""

    delivers: bool
    """Whether the model does."""

    def want_states(self, seq: int, positions: Iterable[int]) -> None:
        """Have the next pass of a sequence keep its states at ``positions``, to go back to."""


@runtime_checkable
class SupportsReservation(Protocol):
    """A cache whose cells can be filled from outside, as all caches with cells are."""

    def land(self, seq: int, incoming: Any) -> Any:
        """Reserve cells behind what the sequence has, for a snapshot whose content is still to come.

        A ``CellReservation`` for an ``IncomingSnapshot`` (kvcache.snapshots.reservation); None, and nothing
        touched, where the cells free do not lie in a run or the host cannot write there.
        """
