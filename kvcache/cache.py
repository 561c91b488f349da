"""The Cache protocol, its optional extensions, the batch of a pass, and the errors that caches raise.

The protocol mirrors Ollama's ``kvcache.Cache`` (kvcache/cache.go). One pass of a model is::

    cache.start_forward(ctx, batch)
    for layer in range(layers):
        cache.set_layer(layer)
        cache.put(ctx, key, value)
        out = cache.attend(ctx, query, scale)      # or: key, value, mask = cache.get(ctx)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import get_ident
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
    "SequenceLostError",
    "ShiftFunction",
    "SnapshotCache",
    "StorageFormat",
    "SupportsReservation",
    "SupportsRollback",
    "SupportsSnapshots",
    "check_context",
    "check_thread",
    "check_whole",
    "computed",
    "whole_numbers",
]

_INT64 = 2**63 - 1

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
    """Base of all errors raised by caches. A call that raises leaves the cache unchanged."""


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
        holders = ", ".join(f"sequence {seq} holds {count}" for seq, count in self.held.items())
        cells = "1 cell is" if asked == 1 else f"{asked} cells are"
        super().__init__(
            f"{op}: {cells} needed and {free} {'is' if free == 1 else 'are'} free"
            + (f" ({holders})" if holders else "")
            + f"; {remedy}"
        )


class NotSupportedError(KVCacheError, ml.NotSupportedError):
    """This cache, as it is configured, does not support the operation."""


class InvalidBatchError(KVCacheError, ValueError):
    """A batch that cannot be stored: negative or repeated positions, unknown sequences, ..."""


class InvalidSequenceError(InvalidBatchError):
    """A sequence id outside ``[0, max_sequences)``."""


class InvalidRangeError(KVCacheError, ValueError):
    """An invalid range of positions, length or shape."""


class OrderError(KVCacheError, RuntimeError):
    """A call out of order: ``put`` before ``start_forward``, ``attend`` before ``put``, a second ``put`` of a
    layer that has already been read, or a call in a pass that another thread began.
    """


class SequenceLostError(KVCacheError, RuntimeError):
    """Moving this sequence's data failed midway (the device, or a shift function); compute it again."""


class ClosedError(KVCacheError, ml.ClosedError):
    """The cache was closed."""


def check_whole(op: str, name: str, value: object, least: int = 0) -> int:
    """``value`` as an int; InvalidRangeError unless it is a whole number from ``least`` on, in 64 bits."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise InvalidRangeError(f"{op}: {name}={value!r}; it must be a whole number of at least {least}")
    if value > _INT64:
        raise InvalidRangeError(f"{op}: {name}={value!r}; it must be at most {_INT64}")
    return int(value)


def whole_numbers(op: str, name: str, values: Iterable[object]) -> list[int]:
    """``values``, each once and ascending; InvalidRangeError unless all are whole numbers of at least 0."""
    if not isinstance(values, Iterable):
        raise InvalidRangeError(f"{op}: {name}={values!r:.40}; it must be a list of whole numbers")
    return sorted({check_whole(op, name, value) for value in values})


def check_context(op: str, ctx: ml.Context, backend: ml.Backend) -> None:
    """Raise DeviceError if ``ctx`` says that it is of another backend than the cache; ClosedError."""
    if getattr(ctx, "backend", backend) is not backend:
        raise ml.DeviceError(
            f"{op}: ctx={ctx!r:.80} is not of {backend!r}, where the cache is; make a context with "
            "cache.backend.new_context()"
        )
    if getattr(ctx, "closed", False):
        raise ml.ClosedError(
            f"{op}: ctx={ctx!r:.80}, or its backend, is closed; make a context with backend.new_context()"
        )


def check_thread(op: str, thread: int) -> None:
    """Raise OrderError unless ``thread`` (of ``get_ident``), which began the pass of a call, is this one."""
    if thread != get_ident():
        raise OrderError(
            f"{op}: thread {thread} began the pass under way, and this is thread {get_ident()}; a pass "
            "belongs to one thread: make all its calls there, or begin another one here with start_forward"
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one forward pass, in any order, of one or more sequences.

    ``positions[i]`` and ``sequences[i]`` are the position and the sequence of token i. ``inputs`` are the
    model's inputs (token ids), ``outputs`` the indices whose logits are wanted (None: all), and
    ``multimodal`` pairs of (index, item) for inputs that are not tokens; caches ignore these three.

    >>> from kvcache import Batch
    >>> batch = Batch(positions=[0, 1, 7], sequences=[0, 0, 1])    # two tokens of a prompt, one decoded
    >>> len(batch)
    3
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
    """The storage format of K or V: plain numbers, or codes that are decoded when read.

    The ``dim`` numbers of a token in a KV head become **parts**, for example codes and
    their scales, each with a width and a dtype. Each part has its own buffer;
    snapshots and stores hold parts.
    ``kvcache.storage.formats`` has the built-in formats and finds those of plugins.
    """

    @property
    def name(self) -> str:
        """The name in snapshots, store keys and commands: formats with one name store the same bits."""

    def parts(self, dim: int, activations: ml.DType) -> tuple[tuple[int, ml.DType], ...]:
        """Width and dtype of each part of ``dim`` numbers whose dtype is ``activations``.

        Raises InvalidRangeError for a ``dim`` that this format does not support.
        """

    def head_dim(self, width: int) -> int:
        """The ``dim`` whose first part is ``width`` wide."""

    def encode(self, ctx: ml.Context, x: ml.Tensor) -> tuple[ml.Tensor, ...]:
        """The parts (..., width) of floats x (..., dim)."""

    def decode(self, ctx: ml.Context, parts: Sequence[ml.Tensor], dim: int) -> ml.Tensor:
        """The floats (..., dim), of any float dtype, that are encoded in the parts (..., width).

        Parts may have any strides. Zeros, which new buffers hold, must decode to finite numbers.
        """

    def bound(self, x: np.ndarray, activations: ml.DType) -> np.ndarray:
        """The largest error of each value of ``x`` (..., dim), which is finite, before the result is cast."""


OneDType: TypeAlias = ml.DType | StorageFormat | str
"""What K, or V, may be stored in: a dtype, a format, or the name of one."""


CacheDType: TypeAlias = OneDType | tuple[OneDType, OneDType]
"""What a cache may be told to store: one for both, or one for K and one for V."""


@runtime_checkable
class Cache(Protocol):
    """The operations that a model needs. Ranges of positions are half-open: ``[begin, end)``."""

    def init(
        self, backend: ml.Backend, dtype: CacheDType, max_sequences: int, capacity: int, max_batch: int
    ) -> None:
        """Bind to a backend. No tensor is allocated before the first ``put``.

        ``dtype`` is the format of K and V: a dtype, a ``StorageFormat``, the name of one, or a pair
        of these, for K and for V. ``capacity`` is the number of tokens per sequence.
        """

    def set_config(self, config: ml.CacheConfig) -> None:
        """Use ``config`` instead of the backend's own; before the first ``start_forward``."""

    def close(self) -> None:
        """Release the tensors; afterwards, all calls but those before a pass (``init``, ``set_config``,
        ``set_layer``) raise ClosedError.
        """

    def start_forward(
        self, ctx: ml.Context, batch: Batch, reserve: bool = False, *, read_only: bool = False
    ) -> None:
        """Find a cell for every token of the batch, evicting what a window no longer sees.

        With ``reserve`` nothing is stored: the pass only has the largest shapes. With ``read_only`` nothing
        is stored either: the batch's tokens are queries over stored tokens, each up to its position.

        Raises InvalidBatchError, CacheFullError.
        """

    def set_layer(self, layer: int) -> None:
        """Select the layer for the following ``put``, ``get`` and ``attend``."""

    def put(self, ctx: ml.Context, key: ml.Tensor, value: ml.Tensor) -> None:
        """Store (tokens, kv_heads, head_dim) and (tokens, kv_heads, v_dim), in the batch's order."""

    def get(self, ctx: ml.Context) -> tuple[ml.Tensor, ml.Tensor, Mask]:
        """(history, kv_heads, head_dim), values likewise, and the mask (tokens, history).

        The history may be in any order, which is that of the mask's columns. The tensors alias the cache and
        are valid until the next ``start_forward``. Raises OrderError for a layer that was not put in this
        pass, unless the pass is read-only; ``attend`` likewise.
        """

    def attend(
        self, ctx: ml.Context, query: ml.Tensor, scale: float, sinks: ml.Tensor | None = None
    ) -> ml.Tensor:
        """Attention of queries (tokens, heads, head_dim) over the stored tokens -> (tokens, heads, v_dim)."""

    def copy_prefix(self, src_seq: int, dst_seq: int, length: int) -> None:
        """Make ``dst_seq`` share positions ``[0, length)`` of ``src_seq``; no data is copied."""

    def can_resume(self, seq: int, position: int) -> bool:
        """Whether everything that a token at ``position`` would attend to is still stored."""

    def remove(self, seq: int, begin: int, end: int | None = None) -> None:
        """Remove positions ``[begin, end)``; the tokens after ``end`` move down by ``end - begin``."""


def computed(cache: SnapshotCache, seq: int) -> int:
    """How many tokens of a sequence all layers have.

    A cache with ``computed(seq)`` knows of passes that put only some of the layers, for example because they
    failed; any other is assumed to have all tokens before ``offset(seq)`` in every layer.
    """
    known = getattr(cache, "computed", None)
    return int(cache.offset(seq) if known is None else known(seq))


# What a cache may offer beyond that: who needs it asks with isinstance, once.


@runtime_checkable
class SupportsRollback(Protocol):
    """A cache whose changes can be checked before they are made, and whose passes can be undone.

    ``prepare_...`` raises what the call itself would raise, and changes nothing; the callable that it returns
    makes the change. If several caches change together, all prepare before the first changes. A cache without
    this protocol is called after the others have prepared and before they change, so that nothing has changed
    if it refuses.
    """

    def prepare_remove(self, seq: int, begin: int, end: int | None = None) -> Callable[[], None]: ...
    def prepare_copy_prefix(self, src_seq: int, dst_seq: int, length: int) -> Callable[[], None]: ...
    def prepare_set_config(self, config: ml.CacheConfig) -> Callable[[], None]: ...

    def pass_under_way(self) -> object:
        """The pass that the last ``start_forward`` began, or None if it has ended."""

    def undo_forward(self, resume: object = None) -> None:
        """Undo the last ``start_forward``; ``resume`` is what ``pass_under_way`` returned before it."""


@runtime_checkable
class SupportsSnapshots(Protocol):
    """A cache whose sequences can be saved and restored. ``kvcache.Snapshot`` lists a snapshot's members."""

    @property
    def nbytes(self) -> int:
        """Bytes of all allocated tensors; 0 before anything is stored."""

    def settings(self) -> dict[str, object]:
        """What determines a snapshot's content, JSON-able: caches with equal settings can share snapshots."""

    def snapshot(self, seq: int, begin: int = 0, end: int | None = None) -> Any:
        """A snapshot of positions ``[begin, end)`` (None: to the end). Nothing is copied yet.

        Raises InvalidRangeError, NotSupportedError if it is not stored, SequenceLostError.
        """

    def restore(self, seq: int, snapshot: Any, target: int | None = None) -> bool:
        """Make the sequence hold positions ``[0, target)`` (None: to the snapshot's end).

        Returns False, without a change, if that is not possible. Raises CacheFullError if there are not
        enough cells, InvalidRangeError for a snapshot of another kind of cache.
        """

    def prepare_restore_snapshot(
        self, seq: int, snapshot: Any, target: int | None = None
    ) -> Callable[[], None] | None:
        """Make all checks of ``restore``; None if it would return False."""

    def merge(self, parent: Any, child: Any) -> Any:
        """Join ``[a, b)`` and ``[b, c)`` to ``[a, c)``; ``parent`` None: the child."""

    def join(self, parts: Sequence[Any]) -> Any:
        """Join one or more consecutive snapshots, in order."""

    def split(self, snapshot: Any, at: int) -> tuple[Any, Any]:
        """Split into ``[a, at)`` and ``[at, c)``; (None, snapshot) if it is indivisible, or at ``a``."""


class SnapshotCache(Cache, SupportsSnapshots, Protocol):
    """The operations that a PrefixCache needs. All caches have them, except those of only encoder outputs.

    For a PrefixCache without tiers, snapshots may be of any class. Tiers, files and stores accept only those
    of this package's caches (``kvcache.snapshots``): others are refused when they leave the device, which is
    logged, and their tokens are computed again.
    """

    on_pressure: Callable[[int], bool | None] | None
    """Called with the number of missing cells before snapshots are copied out of the cache.

    It may drop or detach snapshots, and returns whether it did; it is called again while cells are missing.
    """

    @property
    def backend(self) -> ml.Backend:
        """The backend of ``init``. Raises OrderError before ``init``, ClosedError after ``close``."""

    @property
    def max_sequences(self) -> int: ...

    def offset(self, seq: int) -> int:
        """The position of the next token of a sequence; 0 for an empty one. Raises InvalidSequenceError."""

    def resume_point(self, seq: int, position: int) -> int:
        """The last position up to ``position`` from which the sequence can continue exactly; 0: none."""

    # Snapshots that it takes by itself, at positions that are scheduled before they are reached.

    def schedule_snapshots(self, seq: int, positions: list[int]) -> None:
        """Take a snapshot at each of ``positions`` when the sequence reaches it.

        Raises InvalidRangeError for a position that it has already reached.
        """

    def next_snapshot(self, seq: int) -> int | None:
        """Where a batch of this sequence should end for the next snapshot; None: anywhere."""

    def take_snapshots(self, seq: int, upto: int | None = None) -> list[Any]:
        """The snapshots taken since the last call, by position, up to ``upto`` (None: all)."""

    def snapshots_taken(self, seq: int) -> list[Any]:
        """The snapshots that ``take_snapshots`` would return, without removing them."""

    def skipped_snapshots(self, seq: int) -> list[int]:
        """The scheduled positions, ascending, that were reached since the last call and not taken."""

    def cancel_snapshots(self, seq: int, positions: Collection[int] | None = None) -> None:
        """Take no scheduled snapshots of a sequence at ``positions``.

        None: none at all, and those taken but not yet returned are discarded too.
        """

    def rolled_back(self, seq: int) -> int | None:
        """The lowest position removed since the last call; None if there was none.

        -1 if ``copy_prefix`` replaced the whole sequence (kvcache.snapshots.schedule.REPLACED).
        """


class PutOptions(TypedDict, total=False):
    """What else ``put`` of a cache with cells takes: see ``CausalCache.put``."""

    v_dim: int | None
    extra: Mapping[str, ml.Tensor] | None


@runtime_checkable
class SupportsReservation(Protocol):
    """A cache whose cells can be filled from outside, as all caches with cells are."""

    def land(self, seq: int, incoming: Any) -> Any:
        """Reserve cells after those of the sequence, for a snapshot whose content arrives later.

        Returns a ``CellReservation`` for an ``IncomingSnapshot`` (kvcache.snapshots.reservation). Returns
        None, and changes nothing, if the free cells are not contiguous or the host cannot write to them.
        """
