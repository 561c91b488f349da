"""The encoder cache: what goes with which token, what is refused, and what a failure costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvcache
import ml
from kvcache import Batch
from kvcache.testing.models import values
from kvcache.testing.rigs.attention import outcome
from kvcache.testing.rigs.encoder import EncoderRig
from kvcache.testing.rigs.failing import every_failure, every_way_to_fail
from ml import DType, nn


def test_items_name_the_sequences_that_receive(encoders: Callable[..., EncoderRig]) -> None:
    r = encoders()
    r.start([0, 0], [0, 1])
    r.put(2, 3)
    r.start([1, 4, 5, 1], [0, 1, 1, 2], items=[2, 3])
    r.put(4, 1)
    r.check(computes=False)
    assert r.outputs[0].position == 0
    assert r.outputs[1].position == 5


def test_what_is_asked_out_of_order_is_refused(encoders: Callable[..., EncoderRig]) -> None:
    r = encoders()
    key = r.ctx.zeros((2, 2, 8), DType.F32)
    uses: list[Callable[[], object]] = [
        lambda: r.cache.get(r.ctx),
        lambda: r.cache.put(r.ctx, key, key),
        lambda: r.cache.attend(r.ctx, key, 1.0),
        r.cache.encoder_cached,
    ]
    for use in uses:
        assert isinstance(outcome(use), kvcache.OrderError)
    r.start([0, 0], [0, 1], items=[0])
    r.put(2)
    assert isinstance(outcome(uses[0]), kvcache.OrderError), "sequence 1 has no output"
    assert not r.cache.encoder_cached()
    r.remove(1, 0)
    assert isinstance(outcome(uses[1]), kvcache.OrderError), "a change of sequences ends the pass"
    assert isinstance(outcome(lambda: r.cache.copy_prefix(0, 0, 1)), kvcache.InvalidRangeError)
    assert isinstance(outcome(lambda: r.cache.copy_prefix(0, 1, -1)), kvcache.InvalidRangeError)
    assert isinstance(outcome(lambda: r.cache.remove(0, 3, 2)), kvcache.InvalidRangeError)
    assert isinstance(outcome(lambda: r.cache.encoder_cached(9)), kvcache.InvalidSequenceError)
    r.cache.close()
    for use in [*uses, lambda: r.cache.remove(0, 0), lambda: r.cache.can_resume(0, 0)]:
        assert isinstance(outcome(use), kvcache.ClosedError)
    r.cache.init(r.ctx.backend, DType.F32, 2, 8, 8)
    assert not r.cache.encoder_cached(0)


@pytest.mark.parametrize(
    ("begin", "end", "left"),
    [(3, None, None), (2, 4, None), (4, None, 3), (0, 3, 0), (1, 2, 2), (0, 9, None)],
)
def test_an_output_goes_with_the_token_it_came_with(
    encoders: Callable[..., EncoderRig], begin: int, end: int | None, left: int | None
) -> None:
    r = encoders()
    r.start([3], [0])
    r.put(2)
    r.copy_prefix(0, 1, 4)
    r.remove(0, begin, end)
    assert (r.outputs[0].position if 0 in r.outputs else None) == left
    r.look(computes=False)
    if left is not None:
        r.remove(0, left)
        assert not r.cache.encoder_cached(0)
    assert r.cache.encoder_cached(1)
    assert r.cache.can_resume(0, 0)


def test_a_new_output_leaves_the_one_that_others_share(encoders: Callable[..., EncoderRig]) -> None:
    r = encoders()
    r.start([0], [0])
    r.put(2)
    r.copy_prefix(0, 1, 1)
    r.start([1], [0])
    r.put(2)
    r.look(computes=False)


def test_a_shared_output_is_read_once_by_all_its_readers(
    encoders: Callable[..., EncoderRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    r = encoders()
    r.start([0, 0], [0, 2])
    r.put(5, 3)
    r.copy_prefix(0, 1, 1)
    r.copy_prefix(0, 3, 1)
    r.start([1, 1, 1, 1, 2], [3, 0, 2, 1, 0])
    r.check()
    queries: list[int] = []
    attention = nn.attention

    def counted(ctx: ml.Context, query: ml.Tensor, *others: Any) -> ml.Tensor:
        queries.append(query.shape[0])
        return attention(ctx, query, *others)

    monkeypatch.setattr(nn, "attention", counted)
    r.check_attend(0)
    assert sorted(queries) == [1, 4]


def test_an_output_is_restored_with_its_token_and_what_is_put_later_is_not_in_it(
    encoders: Callable[..., EncoderRig],
) -> None:
    r = encoders()
    r.start([3, 0, 4], [0, 1, 2])
    r.put(3, 1, 2, layers=[0])
    early = r.cache.snapshot(0)
    for layer, parts in ((3, [r.outputs[seq].rows(3) for seq in range(3)]),):
        r.cache.set_layer(layer)
        rows = (r.ctx.from_numpy(np.concatenate([part[i] for part in parts])) for i in range(2))
        r.cache.put(r.ctx, *rows, lengths=(3, 1, 2))
    assert early.layers.keys() == {0}
    r.snapshot(0, 2, 6)
    for target in range(1, 7):
        for seq in (1, 2):
            r.restore(seq, 0, target)
        r.look(computes=False)


def test_reserving_stores_no_output(encoders: Callable[..., EncoderRig]) -> None:
    r = encoders()
    r.start([0], [0])
    r.put(2)
    held = dict(r.outputs)
    r.cache.start_forward(r.ctx, Batch([1, 0], [0, 1]), reserve=True)
    r.cache.set_layer(0)
    key = r.ctx.zeros((8, values.KV_HEADS, values.KEY_DIM), DType.F32)
    r.cache.put(r.ctx, key, key)
    assert r.cache.get(r.ctx)[0].shape[0] == 8
    r.outputs = held
    r.look(computes=False)
    assert not r.cache.encoder_cached(1)


@pytest.mark.parametrize("what", ["start", "put", "get", "copy", "remove"])
@every_way_to_fail
def test_a_failing_backend_leaves_encoder_outputs_as_they_were(
    backend: ml.Backend, what: str, when: str
) -> None:
    def make(limited: ml.Backend, ctx: ml.Context) -> EncoderRig:
        r = EncoderRig(limited, ctx)
        r.start([0, 0], [0, 1])
        r.put(2, 3)
        if what == "put":
            r.start([1], [1])
        return r

    tensors: dict[str, Callable[[EncoderRig], object]] = {
        "start": lambda r: r.cache.start_forward(r.ctx, Batch([1], [0])),
        "put": lambda r: r.cache.put(r.ctx, *_zeros(r.ctx)),
        "get": lambda r: r.cache.get(r.ctx),
        "copy": lambda r: r.cache.copy_prefix(0, 2, 1),
        "remove": lambda r: r.cache.remove(0, 0),
    }
    every_failure(backend, when, make, tensors[what], lambda r: r.look(computes=False), stride=3)


def test_an_earlier_items_output_is_not_read_for_a_later_item(backend: ml.Backend, ctx: ml.Context) -> None:
    r = EncoderRig(backend, ctx)
    r.start([0, 0], [0, 1])
    r.put(2, 3)
    r.start([4, 1], [0, 1], items=[0])
    r.cache.set_layer(0)
    assert isinstance(outcome(lambda: r.cache.get(ctx)), kvcache.OrderError)
    r.put(4)
    r.check(computes=False)
    r.start([4], [0], items=[0])  # the same item once more
    r.check(computes=False)


def _zeros(ctx: ml.Context) -> tuple[ml.Tensor, ml.Tensor]:
    return ctx.zeros((4, 2, 8), DType.F32), ctx.zeros((4, 2, 5), DType.F32)


def test_outputs_of_another_dtype_are_not_restored(encoders: Callable[..., EncoderRig]) -> None:
    r = encoders()
    r.start([1], [0])
    r.put(3)
    snapshot = r.cache.snapshot(0, 0, 4)
    for dtype in (DType.F16, DType.BF16):
        other = encoders(dtype)
        with pytest.raises(kvcache.InvalidRangeError):
            other.cache.restore(0, snapshot)
        assert not other.cache.encoder_cached(0)
    empty = r.cache.snapshot(2)
    assert (empty.begin, empty.end, empty.position, empty.nbytes) == (0, 0, None, 0)
    r.look(computes=False)
