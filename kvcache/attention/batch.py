"""Checking a batch and splitting it by sequence."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

import ml
from kvcache.cache import (
    Batch,
    InvalidBatchError,
    InvalidRangeError,
    InvalidSequenceError,
    check_context,
)
from kvcache.storage.cell_table import numbers

_LIMIT = 2**31 - 1
"""Positions are I32 on the device."""


@dataclass(slots=True)
class SequenceTokens:
    """The tokens of one sequence in a batch, in ascending positions."""

    seq: int
    positions: np.ndarray
    batch_indices: slice | np.ndarray
    """The indices of these tokens in the batch: a slice if they are adjacent and in order."""
    lowest: int
    """The first of the positions."""

    @property
    def first_token(self) -> int:
        """The batch index of the token with the lowest position."""
        own = self.batch_indices
        return own.start if isinstance(own, slice) else int(own[0])

    def __len__(self) -> int:
        return self.positions.size

    def indices(self) -> np.ndarray:
        own = self.batch_indices
        return np.arange(own.start, own.stop) if isinstance(own, slice) else own

    def spread(self, chosen: int | np.ndarray) -> np.ndarray:
        """Cells in ascending positions (the first of a run, or one for each token) as an array in batch
        order.
        """
        return np.arange(chosen, chosen + len(self)) if isinstance(chosen, int) else chosen

    def is_run(self) -> bool:
        return int(self.positions[-1]) - int(self.positions[0]) == self.positions.size - 1

    def follow(self, offset: int) -> bool:
        """Whether the tokens are in order in the batch, with consecutive positions from ``offset``."""
        own = self.batch_indices
        in_order = isinstance(own, slice) or bool((np.diff(own) > 0).all())
        return in_order and self.is_run() and self.lowest == offset


def check_sequence(op: str, seq: object, max_sequences: int) -> None:
    if isinstance(seq, bool) or not isinstance(seq, (int, np.integer)) or not 0 <= seq < max_sequences:
        raise InvalidSequenceError(f"{op}: sequence {seq!r}; it must be in 0 to {max_sequences - 1}")


def check_tensors(op: str, backend: ml.Backend | None = None, /, **tensors: object) -> None:
    """Refuse objects that are not tensors, such as NumPy or framework arrays, and tensors of other
    backends.
    """
    for name, tensor in tensors.items():
        if not hasattr(tensor, "set_rows"):
            kind = f"{type(tensor).__module__}.{type(tensor).__name__}"
            raise ml.DTypeError(
                f"{op}: {name} is a {kind}; it must be a tensor of the cache's backend: "
                "ctx.from_numpy(array), or ctx.from_native for an array of the backend's own framework"
            )
        owner = getattr(tensor, "backend", None)
        if backend is not None and owner is not None and owner is not backend:
            raise ml.DeviceError(
                f"{op}: {name} is a tensor of {owner!r}, and the cache is on {backend!r}; copy it there "
                "by ctx.from_numpy(tensor.to_numpy())"
            )


def check_query(
    ctx: ml.Context, backend: ml.Backend | None, query: ml.Tensor, tokens: int, key: tuple[int, ...],
    scale: float | None, sinks: ml.Tensor | None,
) -> float:  # fmt: skip
    """The scale (None: 1/sqrt(head_dim)).

    Raises unless ``ctx`` and ``query`` belong to the cache's backend, ``query`` has ``tokens`` rows of floats
    that fit the layer's keys, and ``sinks`` has one float for each head of the query.
    """
    if backend is not None and getattr(ctx, "backend", backend) is not backend:
        check_context("attend", ctx, backend)
    check_tensors("attend", backend, query=query)
    if not query.dtype.is_float:
        raise ml.DTypeError(f"attend: query in {query.dtype.name}; it must be a float dtype")
    kv_heads, dim = key
    shape = query.shape
    if len(shape) != 3 or shape[0] != tokens or shape[2] != dim or not shape[1] or shape[1] % kv_heads:
        raise InvalidRangeError(
            f"attend: query {shape}; it must be ({tokens}, heads, {dim}), heads a multiple of the "
            f"{kv_heads} KV heads"
        )
    if sinks is not None:
        check_tensors("attend", backend, sinks=sinks)
        if sinks.shape != (shape[1],) or not sinks.dtype.is_float:
            raise InvalidRangeError(
                f"attend: sinks {sinks.shape} in {sinks.dtype.name}; they must be ({shape[1]},), a float for "
                "each head of the query"
            )
    if type(scale) is float:
        return scale
    try:
        return float(dim**-0.5 if scale is None else scale)
    except (TypeError, ValueError) as error:
        raise InvalidRangeError(f"attend: scale={scale!r:.40}; it must be a number") from error


def check_modes(reserve: bool, read_only: bool) -> None:
    if reserve and read_only:
        raise InvalidBatchError(
            "start_forward: reserve=True and read_only=True cannot be combined; a pass reserves the "
            "largest shapes, or reads what is stored"
        )


def split_batch(batch: Batch, max_sequences: int) -> list[SequenceTokens]:
    """The batch's groups in ascending order of sequence.

    Raises InvalidBatchError for an empty batch, unequal lengths, a position that is negative, not an integer
    or beyond I32, a repeated pair, or a sequence outside ``[0, max_sequences)``.
    """
    if not isinstance(batch, Batch):
        raise InvalidBatchError(
            f"start_forward: batch={batch!r:.60}; it must be a kvcache.Batch(positions, sequences)"
        )
    positions, sequences = batch.positions, batch.sequences
    try:
        count, owned = len(positions), len(sequences)
    except TypeError as error:
        raise InvalidBatchError(
            f"start_forward: positions={positions!r:.40} and sequences={sequences!r:.40}; they must be "
            "sequences of integers, one for each token"
        ) from error
    if count != owned:
        raise InvalidBatchError(
            f"start_forward: {count} positions and {owned} sequences; every token must have one of each"
        )
    if count == 0:
        raise InvalidBatchError("start_forward: the batch is empty; it must contain at least one token")
    if count == 1 and isinstance(positions, (list, tuple, range)) and isinstance(sequences, (list, tuple)):
        position, seq = positions[0], sequences[0]
        if type(position) is int is type(seq) and 0 <= position <= _LIMIT and 0 <= seq < max_sequences:
            return [SequenceTokens(seq, numbers(position, position + 1), slice(0, 1), position)]
    ordered, owners = _integers("positions", positions), _integers("sequences", sequences)
    low, high = int(owners.min()), int(owners.max())
    check_sequence("start_forward", low, max_sequences)
    check_sequence("start_forward", high, max_sequences)
    if low == high:
        return [_one_sequence(low, ordered)]
    return _one_each(ordered, owners) or _several(ordered, owners)


def _integers(name: str, values: object) -> np.ndarray:
    try:
        array = np.array(values)  # a copy: the caller may modify its own
    except ValueError:  # of unequal lengths
        array = np.empty(0, dtype=object)
    if array.ndim == 1 and array.dtype.kind == "O":  # NumPy's representation of integers beyond 64 bits
        for value in array:
            if isinstance(value, int) and not -_LIMIT <= value <= _LIMIT:
                raise _beyond(name, value)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidBatchError(
            f"start_forward: {name} are {array.dtype} {array.shape}; they must be integers in one row"
        )
    if array.dtype == np.int64:
        return array
    if array.dtype.kind == "u" and array.size and array.max() > _LIMIT:
        raise _beyond(name, array.max())
    return array.astype(np.int64)


def _beyond(name: str, value: object) -> InvalidBatchError:
    return InvalidBatchError(f"start_forward: {name} has {value}; it must be at most {_LIMIT}")


def _one_sequence(seq: int, positions: np.ndarray) -> SequenceTokens:
    order: slice | np.ndarray = slice(0, positions.size)
    if positions.size > 1 and not (positions[1:] > positions[:-1]).all():
        order = np.argsort(positions, kind="stable")
        positions = positions[order]
    group = SequenceTokens(seq, positions, order, int(positions[0]))
    _check_positions(group)
    return group


def _one_each(positions: np.ndarray, sequences: np.ndarray) -> list[SequenceTokens] | None:
    """The groups of a decoding batch, which has one token per sequence; None for any other batch."""
    order = sequences.argsort()
    ascending = sequences[order]
    if (ascending[1:] == ascending[:-1]).any() or positions.min() < 0 or positions.max() > _LIMIT:
        return None
    return [
        SequenceTokens(seq, positions[i : i + 1], slice(i, i + 1), lowest)
        for seq, i, lowest in zip(ascending.tolist(), order.tolist(), positions[order].tolist(), strict=True)
    ]


def _several(positions: np.ndarray, sequences: np.ndarray) -> list[SequenceTokens]:
    order = np.lexsort((positions, sequences))
    sorted_sequences = sequences[order]
    cuts = np.flatnonzero(sorted_sequences[1:] != sorted_sequences[:-1]) + 1
    edges = [0, *cuts.tolist(), order.size]
    groups = []
    for start, stop in itertools.pairwise(edges):
        rows = order[start:stop]
        side_by_side = stop - start == 1 or bool((rows[1:] - rows[:-1] == 1).all())
        first = int(rows[0])
        group = SequenceTokens(
            int(sorted_sequences[start]),
            positions[rows],
            slice(first, first + stop - start) if side_by_side else rows,
            int(positions[first]),
        )
        _check_positions(group)
        groups.append(group)
    return groups


def _check_positions(group: SequenceTokens) -> None:
    positions = group.positions
    if group.lowest < 0:
        raise InvalidBatchError(
            f"start_forward: position {group.lowest} of sequence {group.seq}; it must be at least 0"
        )
    if positions[-1] > _LIMIT:
        raise InvalidBatchError(
            f"start_forward: position {positions[-1]} of sequence {group.seq}; it must be at most {_LIMIT}"
        )
    if positions.size > 1:
        twice = np.flatnonzero(positions[1:] == positions[:-1])
        if twice.size:
            raise InvalidBatchError(
                f"start_forward: position {positions[twice[0]]} of sequence {group.seq} is given twice"
            )
