"""Masks as matrices.

A case is a list of batches. Tokens are written sequence:position and are lettered a, b, c, ... in order over
all batches. Below each batch: a line per query, a column per token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import kvcache
import ml
from kvcache import Batch
from kvcache.testing.harness import ARRANGEMENTS, CacheCase, MakeRig, every_arrangement
from kvcache.testing.models import values
from kvcache.testing.models.attention import Setup
from kvcache.testing.rigs.attention import look
from ml import DType


@dataclass(frozen=True)
class Step:
    batch: str
    matrix: str
    lifted: tuple[int, ...] = ()

    def pairs(self) -> list[tuple[int, int]]:
        """(sequence, position) of each token."""
        return [(int(seq), int(position)) for seq, position in (t.split(":") for t in self.batch.split())]

    def sees(self) -> dict[str, set[str]]:
        header, *lines = [line.split() for line in self.matrix.strip().splitlines()]
        assert all(len(line) == len(header) + 1 for line in lines)
        return {
            line[0]: {column for column, mark in zip(header, line[1:], strict=True) if mark == "x"}
            for line in lines
        }


PLAIN, TWO = Setup(), Setup(max_sequences=3)

CASES: dict[str, tuple[Setup, list[Step]]] = {
    "one sequence": (PLAIN, [
        Step("0:0 0:1 0:2 0:3", """
              a b c d
            a x . . .
            b x x . .
            c x x x .
            d x x x x"""),
        Step("0:4", """
              a b c d e
            e x x x x x"""),
        Step("0:5 0:6", """
              a b c d e f g
            f x x x x x x .
            g x x x x x x x"""),
    ]),
    "two sequences in one batch": (TWO, [
        Step("0:0 0:1 1:0 1:1", """
              a b c d
            a x . . .
            b x x . .
            c . . x .
            d . . x x"""),
        Step("1:2 0:2", """
              a b c d e f
            e . . x x x .
            f x x . . . x"""),
    ]),
    "an unordered batch": (PLAIN, [
        Step("0:2 0:0 0:3 0:1", """
              a b c d
            a x x . x
            b . x . .
            c x x x x
            d . x . x"""),
        Step("0:5 0:4", """
              a b c d e f
            e x x x x x x
            f x x x x . x"""),
    ]),
    "an image in the middle of a prompt": (PLAIN, [
        Step("0:0 0:1 0:2 0:3 0:4", """
              a b c d e
            a x . . . .
            b x x x x x
            c x x x x x
            d x x x x .
            e x x x x x""", lifted=(1, 2)),
        Step("0:5 0:6", """
              a b c d e f g
            f x x x x x x .
            g x x x x x x x"""),
    ]),
    "a window of 2": (Setup(window=2, max_sequences=1), [
        Step("0:0 0:1 0:2 0:3 0:4", """
              a b c d e
            a x . . . .
            b x x . . .
            c x x x . .
            d . x x x .
            e . . x x x"""),
        Step("0:5 0:6", """
              a b c d e f g
            f . . . x x x .
            g . . . . x x x"""),
        Step("0:7", """
              a b c d e f g h
            h . . . . . x x x"""),
    ]),
    "a window of 1 with the first 2 kept": (Setup(window=1, keep=2, max_sequences=1), [
        Step("0:0 0:1 0:2 0:3 0:4", """
              a b c d e
            a x . . . .
            b x x . . .
            c x x x . .
            d x x x x .
            e x x . x x"""),
        Step("0:5 0:6", """
              a b c d e f g
            f x x . . x x .
            g x x . . . x x"""),
    ]),
    "an image that sees the first tokens too": (Setup(window=1, keep=1, max_sequences=1), [
        Step("0:0 0:1 0:2 0:3 0:4", """
              a b c d e
            a x . . . .
            b x x . . .
            c x x x . .
            d x . x x x
            e x . . x x""", lifted=(3,)),
    ]),
    "a window of 0: the token itself": (Setup(window=0, max_sequences=1), [
        Step("0:0 0:1 0:2", """
              a b c
            a x . .
            b . x .
            c . . x"""),
        Step("0:3", """
              a b c d
            d . . . x"""),
    ]),
    "a window counts positions, not tokens": (Setup(window=3, max_sequences=1), [
        Step("0:1 0:4 0:9", """
              a b c
            a x . .
            b x x .
            c . . x"""),
        Step("0:12 0:10", """
              a b c d e
            d . . x x x
            e . . x . x"""),
    ]),
    "chunks of 3": (Setup(chunk=3), [
        Step("0:0 0:1 0:2 0:3 0:4", """
              a b c d e
            a x . . . .
            b x x . . .
            c x x x . .
            d . . . x .
            e . . . x x"""),
        Step("0:5 0:6", """
              a b c d e f g
            f . . . x x x .
            g . . . . . . x"""),
    ]),
    "an image in a chunk sees on, not back": (Setup(chunk=2), [
        Step("0:0 0:1 0:2 0:3 0:4", """
              a b c d e
            a x . . . .
            b x x . . .
            c . . x x x
            d . . x x .
            e . . . . x""", lifted=(2,)),
    ]),
}  # fmt: skip


def walk(ctx: ml.Context, cache: kvcache.CausalCache, steps: list[Step]) -> None:
    """Run the batches, and compare what every query sees with the matrices."""
    stored = 0
    for step in steps:
        pairs = step.pairs()
        ids = np.arange(stored + 1, stored + len(pairs) + 1)
        stored += len(pairs)
        cache.start_forward(ctx, Batch([p for _, p in pairs], [s for s, _ in pairs]))
        cache.set_layer(0)
        key, value = values.keys(ids, [p for _, p in pairs]), values.values(ids)
        cache.put(ctx, ctx.from_numpy(key), ctx.from_numpy(value))
        if step.lifted:
            cache.set_causal(ctx, except_=step.lifted)
        actual = {
            _letter(token): {_letter(other) for other in seen.values()}
            for token, seen in zip(ids.tolist(), look(cache, ctx, len(pairs)), strict=True)
        }
        assert actual == step.sees()


def _letter(token: int) -> str:
    return chr(ord("a") + token - 1)


class MaskTests(CacheCase):
    @pytest.mark.parametrize(("setup", "steps"), list(CASES.values()), ids=list(CASES))
    def test_a_query_sees_exactly(
        self, backend: ml.Backend, ctx: ml.Context, setup: Setup, steps: list[Step]
    ) -> None:
        for arranged in ARRANGEMENTS.values():
            walk(ctx, replace(setup, config=arranged).make(backend), steps)

    # The form of the mask. ``look`` always checks that it has only 0 and -inf, and the padding.

    @pytest.mark.parametrize("mask_dtype", [DType.F32, DType.F16, DType.BF16])
    def test_rows_and_columns_are_rounded_up_to_the_padding(self, rig: MakeRig, mask_dtype: DType) -> None:
        r = rig(config=ml.CacheConfig(cache_padding=8, mask_batch_padding=4, mask_dtype=mask_dtype))
        for positions, rows in (([0], 4), ([1, 2, 3, 4], 4), ([5, 6, 7, 8, 9], 8)):
            r.forward(positions, 0)
            key, value, mask = r.cache.get(r.ctx)
            assert isinstance(mask, ml.Tensor)
            assert mask.dtype is mask_dtype
            assert mask.shape[0] == rows
            assert mask.shape[1] == key.shape[0] == value.shape[0]
            assert mask.shape[1] % 8 == r.cache.cells % 8 == 0

    def test_an_elided_mask_is_causal_bottom_right_for_a_prompt_and_none_where_all_see_all(
        self, rig: MakeRig
    ) -> None:
        r = rig(config=ml.CacheConfig(elide_mask=True))
        batches: list[tuple[list[int], list[int], Any]] = [
            ([0, 1, 2], [], ml.CAUSAL),
            ([3], [], None),
            ([4, 5], [], ml.CAUSAL),
            ([6, 7], [0, 1], None),
        ]
        for positions, lifted, expected in batches:
            r.forward(positions, 0, lifted)
            key, _, mask = r.cache.get(r.ctx)
            assert mask is expected
            stored = values.decode(key.to_numpy().astype(np.float32))[1]
            assert stored.tolist() == list(range(positions[-1] + 1)), "rows lie in the order of positions"

    @pytest.mark.parametrize(
        ("setup", "batches"),
        [
            (Setup(max_sequences=2), [([0, 0], [0, 1])]),
            (Setup(), [([2, 0, 1], [0, 0, 0])]),
            (Setup(), [([4], [0]), ([1, 2], [0, 0])]),
            (Setup(), [([2, 3], [0, 0]), ([0, 1], [0, 0]), ([4, 5], [0, 0])]),
            (Setup(window=1, max_sequences=1), [([0, 1, 2], [0, 0, 0])]),
            (Setup(window=1, keep=1, max_sequences=1), [([0, 1, 2, 3], [0, 0, 0, 0])]),
            (Setup(chunk=2), [([0, 1, 2], [0, 0, 0])]),
        ],
        ids=[
            *("two sequences", "unordered", "into a gap", "cells out of order"),
            *("window", "window with the first kept", "chunk"),
        ],
    )
    def test_a_mask_that_says_more_is_not_elided(
        self, rig: MakeRig, setup: Setup, batches: list[tuple[list[int], list[int]]]
    ) -> None:
        r = rig(setup, config=ml.CacheConfig(elide_mask=True))
        for positions, sequences in batches:
            r.forward(positions, sequences)
        assert isinstance(r.cache.get(r.ctx)[2], ml.Tensor)

    # Except-lists.

    @every_arrangement
    def test_an_except_list_lasts_until_the_next_start_forward(
        self, rig: MakeRig, arranged: ml.CacheConfig
    ) -> None:
        r = rig(config=arranged, layers=2)
        r.start([0, 1, 2], [0, 0, 0])
        r.cache.set_causal(r.ctx, except_=[1])  # before it is put
        r.put()
        for lifted in ([1], [0], [1, 2], []):
            r.cache.set_causal(r.ctx, except_=lifted)
            r.check_seen(lifted)
        r.cache.set_causal(r.ctx, except_=[0])
        for wrong in ([3], [-1], [0, 7]):
            with pytest.raises(kvcache.InvalidRangeError):
                r.cache.set_causal(r.ctx, except_=wrong)
        r.check_seen([0])
        r.forward([3, 4], 0)
