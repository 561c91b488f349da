"""Bugs of what a backend may offer beyond the core: capabilities, stores of K and V, groups of ranks."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

import ml
from ml.base import SoloGroup
from ml.base.group import check_timeout
from ml.testing.groups import GroupTests
from ml.testing.optional import CapabilityTests
from ml.testing.stores import KVStoreTests

from .planting import mutant, override

# Capabilities.


def with_attention(numpy: ModuleType, attention: Any) -> None:
    numpy.NumpyBackend.attention = attention


def _attention(ctx: Any, *args: Any) -> Any:
    from ml.nn import generic_attention

    return generic_attention(ctx, *args)


@mutant(CapabilityTests)
def causal_is_top_left_aligned(numpy: ModuleType) -> None:
    def attention(
        self: Any, ctx: Any, q: Any, k: Any, v: Any, mask: Any, scale: float, sinks: Any = None
    ) -> Any:
        if mask is ml.CAUSAL:
            rows, columns = np.indices((q.shape[0], k.shape[0]))
            mask = ctx.from_numpy(np.where(columns <= rows, 0, -np.inf).astype(np.float32))
        return _attention(ctx, q, k, v, mask, scale, sinks)

    with_attention(numpy, attention)


@mutant(CapabilityTests)
def sinks_are_ignored(numpy: ModuleType) -> None:
    with_attention(numpy, lambda self, ctx, *args: _attention(ctx, *args[:5]))


@mutant(CapabilityTests)
def cache_config_is_a_dict(numpy: ModuleType) -> None:
    numpy.NumpyBackend.cache_config = lambda self: {"cache_padding": 32}


# Stores of K and V.


class SlowStore:
    """A store by way of slice and copy, which refuse by raising; the mutants get one thing wrong."""

    copies_reads = checks_both_first = aliases_declined = False
    late = 0

    def __init__(self, backend: Any, key: Any, value: Any) -> None:
        self.backend, self.halves = backend, (key, value)

    def write(self, ctx: Any, start: int, count: int, *new: Any) -> bool:
        if not self._plain(ctx, start, count) or any(n.backend is not self.backend for n in new):
            return False
        begin = min(start + self.late, self.halves[0].shape[0] - count)
        wrong = [n.shape != (count, *half.shape[1:]) for n, half in zip(new, self.halves, strict=True)]
        shared = any(n.storage is half.storage for n, half in zip(new, self.halves, strict=True))
        if (self.checks_both_first and any(wrong)) or (self.aliases_declined and shared):
            return False
        try:
            for source, half in zip(new, self.halves, strict=True):
                source.copy(ctx, half.slice(ctx, 0, begin, begin + count))
        except ml.MLError:
            return False
        return True

    def _plain(self, ctx: Any, start: int, count: int) -> bool:
        inside = count > 0 and 0 <= start <= self.halves[0].shape[0] - count
        return inside and ctx.backend is self.backend and not ctx.closed

    def read(self, ctx: Any, start: int, count: int) -> Any:
        if not self._plain(ctx, start, count):
            return None
        found = [half.slice(ctx, 0, start, start + count) for half in self.halves]
        return tuple(part.contiguous(ctx) for part in found) if self.copies_reads else tuple(found)


def with_store(numpy: ModuleType, **faults: Any) -> None:
    kind = type("Store", (SlowStore,), {"checks_both_first": True, "aliases_declined": True} | faults)
    numpy.NumpyBackend.kv_store = lambda self, key, value: kind(self, key, value)


@mutant(KVStoreTests)
def a_store_writes_a_row_late(numpy: ModuleType) -> None:
    with_store(numpy, late=1)


@mutant(KVStoreTests)
def a_store_reads_copies(numpy: ModuleType) -> None:
    with_store(numpy, copies_reads=True)


@mutant(KVStoreTests)
def a_store_writes_keys_before_it_looks_at_values(numpy: ModuleType) -> None:
    with_store(numpy, checks_both_first=False)


@mutant(KVStoreTests)
def a_store_takes_what_lies_in_its_own_memory(numpy: ModuleType) -> None:
    with_store(numpy, aliases_declined=False)


# Groups of ranks.


def with_group(numpy: ModuleType, exclusive: bool = True, closes: bool = True, **methods: Any) -> None:
    """A group of one rank for the NumPy backend, some of whose methods are others."""
    kind = type("Group", (SoloGroup,), methods)

    def distributed(self: Any, timeout: float = 60.0) -> Any:
        self.check("distributed")
        open_one = getattr(self, "group", None)
        if exclusive and open_one is not None and not open_one.closed:
            raise ml.GroupError(f"distributed: {open_one!r} is open on this backend; close it first")
        self.group = kind(self, check_timeout(timeout))
        return self.group

    numpy.NumpyBackend.distributed = distributed
    if closes:

        @override(numpy.NumpyBackend, "close")
        def _(original: Any, self: Any) -> None:
            if (group := getattr(self, "group", None)) is not None:
                group.close()
            original(self)


@mutant(GroupTests)
def a_sum_is_the_operand_itself(numpy: ModuleType) -> None:
    with_group(numpy, _all_reduce=lambda self, ctx, tensor: tensor)


@mutant(GroupTests)
def a_sum_counts_a_rank_twice(numpy: ModuleType) -> None:
    with_group(numpy, _all_reduce=lambda self, ctx, tensor: tensor.add(ctx, tensor))


@mutant(GroupTests)
def gathering_forgets_strides(numpy: ModuleType) -> None:
    def gather(self: Any, ctx: Any, tensor: Any, axis: int) -> Any:
        return ctx.from_numpy(tensor.native.ravel("K").reshape(tensor.shape), tensor.dtype)

    with_group(numpy, _all_gather=gather)


@mutant(GroupTests)
def a_closed_group_goes_on(numpy: ModuleType) -> None:
    with_group(numpy, _check_open=lambda self, op: None)


@mutant(GroupTests)
def a_second_group_opens_beside_the_first(numpy: ModuleType) -> None:
    with_group(numpy, exclusive=False)


@mutant(GroupTests)
def a_group_outlives_its_backend(numpy: ModuleType) -> None:
    with_group(numpy, closes=False)
