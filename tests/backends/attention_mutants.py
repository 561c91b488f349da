"""Deliberate bugs in attention, beside those of the other files: ``MUTANTS`` has them all."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

import ml
import ml.base
from ml.nn import generic_attention, generic_partial_attention
from ml.ragged import RaggedPlan
from ml.testing.attention import AttentionTests
from ml.testing.ragged import ragged_reference

from .backend_mutants import Mutant, mutant
from .page_mutants import MUTANTS


def _top_left(ctx: Any, tokens: int, history: int) -> Any:
    rows, columns = np.indices((tokens, history))
    return ctx.from_numpy(np.where(columns <= rows, 0, -np.inf).astype(np.float32))


@mutant(AttentionTests)
def causal_is_top_left_aligned(numpy: ModuleType) -> None:
    def attention(self: Any, ctx: Any, q: Any, k: Any, v: Any, mask: Any, *rest: Any) -> Any:
        mask = _top_left(ctx, q.shape[0], k.shape[0]) if mask is ml.CAUSAL else mask
        return generic_attention(ctx, q, k, v, mask, *rest)

    numpy.NumpyBackend.attention = attention


@mutant(AttentionTests)
def sinks_are_ignored(numpy: ModuleType) -> None:
    numpy.NumpyBackend.attention = lambda self, ctx, *args: generic_attention(ctx, *args[:5])


@mutant(AttentionTests)
def a_mask_of_one_row_serves_every_query(numpy: ModuleType) -> None:
    def attention(self: Any, ctx: Any, q: Any, k: Any, v: Any, mask: Any, *rest: Any) -> Any:
        if isinstance(mask, ml.base.BaseTensor) and mask.shape[0] == 1:
            mask = mask.repeat(ctx, 0, q.shape[0])
        return generic_attention(ctx, q, k, v, mask, *rest)

    numpy.NumpyBackend.attention = attention


@mutant(AttentionTests)
def padded_rows_of_a_mask_are_queries_too(numpy: ModuleType) -> None:
    def attention(self: Any, ctx: Any, q: Any, k: Any, v: Any, mask: Any, *rest: Any) -> Any:
        if isinstance(mask, ml.base.BaseTensor) and mask.shape[0] > q.shape[0]:
            q = q.concat(ctx, ctx.zeros((mask.shape[0] - q.shape[0], *q.shape[1:]), q.dtype), 0)
        return generic_attention(ctx, q, k, v, mask, *rest)

    numpy.NumpyBackend.attention = attention


def partial_mutant(function: Any) -> Any:
    """A partial attention, from a function that is given the context, query, key, value, mask and scale."""

    def plant(numpy: ModuleType) -> None:
        numpy.NumpyBackend.partial_attention = lambda self, *args: function(*args)
        numpy.NumpyBackend.attention_calls = lambda self, *args: None

    MUTANTS.append(Mutant(function.__name__, AttentionTests, plant))
    return function


@partial_mutant
def causal_parts_are_top_left_aligned(ctx: Any, q: Any, k: Any, v: Any, mask: Any, scale: float) -> Any:
    if mask is ml.CAUSAL:
        matrix = _top_left(ctx, q.shape[1], k.shape[1])
        mask = matrix.reshape(ctx, 1, *matrix.shape)
    return generic_partial_attention(ctx, q, k, v, mask, scale)


@partial_mutant
def the_logarithm_is_to_base_2(ctx: Any, *args: Any) -> Any:
    out, lse = generic_partial_attention(ctx, *args)
    return out, lse.scale(ctx, 1 / math.log(2))


@partial_mutant
def the_log_sum_exp_is_of_the_dtype_of_the_keys(ctx: Any, *args: Any) -> Any:
    out, lse = generic_partial_attention(ctx, *args)
    return out, lse.cast(ctx, out.dtype)


@partial_mutant
def all_batches_have_the_mask_of_the_first(ctx: Any, q: Any, k: Any, v: Any, mask: Any, scale: float) -> Any:
    mask = mask if mask in (None, ml.CAUSAL) else mask.slice(ctx, 0, 0, 1)
    return generic_partial_attention(ctx, q, k, v, mask, scale)


@partial_mutant
def batches_are_read_one_behind_the_other(ctx: Any, q: Any, k: Any, *args: Any) -> Any:
    close = (k.strides[1] * k.shape[1], *k.strides[1:]) if k.strides[1] < k.strides[2] else k.strides
    return generic_partial_attention(ctx, q, k.view(ctx, 0, k.shape, close), *args)


@partial_mutant
def the_log_sum_exp_forgets_the_maximum(ctx: Any, q: Any, *args: Any) -> Any:
    out, lse = generic_partial_attention(ctx, q, *args)
    with np.errstate(all="ignore"):
        return out, ctx.from_numpy(np.log(np.exp(lse.to_numpy())))


@partial_mutant
def queries_are_scaled_in_place(ctx: Any, q: Any, *args: Any) -> Any:
    *rest, scale = args
    q.scale(ctx, scale).copy(ctx, q)
    return generic_partial_attention(ctx, q, *rest, 1.0)


@partial_mutant
def masks_of_integers_are_added(ctx: Any, q: Any, k: Any, v: Any, mask: Any, scale: float) -> Any:
    if isinstance(mask, ml.base.BaseTensor):
        mask = mask.cast(ctx, ml.DType.F32)
    return generic_partial_attention(ctx, q, k, v, mask, scale)


@mutant(AttentionTests, "NumpyTensor._softmax")
def minus_infinity_weighs_a_little(original: Any, self: Any, ctx: Any, axis: int) -> Any:
    """Next to what weighs little too."""
    low = np.isneginf(self.native)
    if not low.any() or self.shape[-1] != 2:
        return original(self, ctx, axis)
    return original(self.own(ctx, np.where(low, np.float32(-300.0), self.native), self.dtype), ctx, axis)


def ragged_mutant(name: str, change: Callable[[RaggedPlan], None] | None = None, **options: Any) -> Mutant:
    """Attention from its definition, by a plan that was changed; ``sinks=None`` leaves them out."""

    def attend(self: Any, ctx: Any, *given: Any) -> Any:
        *qkv, plan, scale, sinks = given
        mine = RaggedPlan(plan.tokens, plan.segments.copy(), plan.readers.copy(), plan.index)
        if change is not None:
            change(mine)
        hosts = [x.to_numpy() for x in qkv]
        logits = options.get("sinks", None if sinks is None else sinks.to_numpy())
        out = ragged_reference(*hosts, mine, scale, logits)
        return ctx.from_numpy(out.astype(qkv[0].dtype.numpy))

    def plant(numpy: ModuleType) -> None:
        numpy.NumpyBackend.ragged_attention = attend

    return Mutant(name, AttentionTests, plant)


def _from_the_start(plan: RaggedPlan) -> None:
    plan.readers[:, 1] = 0


def to_the_end(plan: RaggedPlan) -> None:
    for _, _, length, first, stop in plan.segments:
        plan.readers[first:stop, 2] = length


def _as_runs(plan: RaggedPlan) -> None:
    for segment in plan.segments:
        if segment[0]:
            segment[:2] = 0, plan.index[segment[1] : segment[1] + segment[2]].min()


def one_further(plan: RaggedPlan) -> None:
    """Reads a row behind the last, which no segment has."""
    plan.segments[:, 2] += 1
    plan.readers[-1, 2] += 1


MUTANTS += [
    ragged_mutant("a_reader_begins_with_its_segment", _from_the_start),
    ragged_mutant("a_reader_ends_with_its_segment", to_the_end),
    ragged_mutant("a_list_of_rows_is_read_as_a_run", _as_runs),
    ragged_mutant("a_row_behind_the_last_is_read", one_further),
    ragged_mutant("a_ragged_batch_ignores_its_sinks", sinks=None),
]
