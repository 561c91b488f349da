"""Backends beside each other: two of one framework, many threads, other processes, and the end."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import kvcache
import ml
from kvcache.testing.traces import run_traces
from ml import DType

from ..rigs.each_backend import need_backend

NAMES = ("numpy", "torch", "mlx", "cupy")
THREADS = 4
ROUNDS = 25


@pytest.fixture(params=NAMES)
def open_one(request: pytest.FixtureRequest) -> Iterator[Callable[[], Any]]:
    """Opens one more backend of the framework; all are closed after the test."""
    need_backend(request.param)
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(ml.open_backend(request.param, **options))


def in_threads(work: Callable[[int], Any]) -> list[Any]:
    """``work(i)`` in THREADS threads that all begin at once."""
    barrier = threading.Barrier(THREADS)

    def run(i: int) -> Any:
        barrier.wait(timeout=60)
        return work(i)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(THREADS)))


def ramp(ctx: Any, start: int, dtype: DType = DType.F32) -> Any:
    return ctx.from_numpy(np.arange(start, start + 12, dtype=np.float32).reshape(3, 4), dtype)


# Two of one framework.


def test_two_backends_of_one_framework_know_nothing_of_each_other(open_one: Callable[..., Any]) -> None:
    first, second = open_one(), open_one(dtype=DType.F16)
    a, b = first.new_context(), second.new_context()
    x, y = ramp(a, 0), ramp(b, 100)
    assert first.memory().allocated == second.memory().allocated == 48
    assert (a.from_numpy([0.5]).dtype, b.from_numpy([0.5]).dtype) == (DType.F32, DType.F16)
    for mixed in (lambda: x.add(a, y), lambda: x.copy(a, y), lambda: x.exp(b), lambda: b.forward(x)):
        with pytest.raises(ml.DeviceError, match="from_numpy"):
            mixed()
    moved = b.from_native(x.native)
    assert moved.add(b, b.full((4,), 1, DType.F32)).to_numpy()[0].tolist() == [1, 2, 3, 4]
    first.close()
    with pytest.raises(ml.ClosedError):
        x.to_numpy()
    assert y.add(b, y).to_numpy()[0].tolist() == [200, 202, 204, 206]


def accumulate(ctx: Any, value: float, rounds: int) -> Any:
    total = ctx.zeros((3, 4), DType.F32)
    step = ctx.full((3, 4), value, DType.F32)
    for _ in range(rounds):
        total.add(ctx, step).copy(ctx, total)
    return total.reshape(ctx, 12).sum(ctx, 0).to_numpy()


# Many threads.


@pytest.mark.parametrize("count", [1, THREADS], ids=["one backend", "one for each"])
def test_threads_with_a_context_each_do_not_disturb_one_another(
    open_one: Callable[..., Any], count: int
) -> None:
    backends = [open_one() for _ in range(count)]

    def work(i: int) -> list[float]:
        with backends[i % count].new_context() as ctx:
            return [float(accumulate(ctx, i + 1, rounds)) for rounds in range(ROUNDS)]

    expected = [[12 * (i + 1) * rounds for rounds in range(ROUNDS)] for i in range(THREADS)]
    assert in_threads(work) == expected
    gc.collect()
    assert [backend.memory().allocated for backend in backends] == [0] * count


def test_threads_write_their_own_rows_of_one_storage(open_one: Callable[..., Any]) -> None:
    backend = open_one()
    main = backend.new_context()
    shared = main.zeros((THREADS * ROUNDS, 8), DType.F32)

    def work(i: int) -> None:
        ctx = backend.new_context()
        for n in range(ROUNDS):
            row = i * ROUNDS + n
            source = ctx.full((1, 8), row, DType.F32)
            if n % 2:
                shared.set_rows(ctx, source, [row])
            else:
                source.copy(ctx, shared.slice(ctx, 0, row, row + 1))
            if n % 7 == i:
                ctx.compute(shared)
            if n % 11 == i:
                assert shared.slice(ctx, 0, row, row + 1).to_numpy()[0, 3] == row

    in_threads(work)
    np.testing.assert_array_equal(shared.to_numpy()[:, 3], np.arange(THREADS * ROUNDS))


def test_a_cache_in_every_thread(open_one: Callable[..., Any]) -> None:
    """The unit that runtimes give to a thread: contexts and caches of its own."""
    backend = open_one()
    found = in_threads(lambda i: run_traces(backend, range(2 * i, 2 * i + 2), most=1))
    assert found == [[]] * THREADS


# Processes.


def test_a_cache_that_is_not_initialized_can_be_sent_to_another_process() -> None:
    parts = [kvcache.CausalCache(), kvcache.SlidingWindowCache(4, keep=1), kvcache.ChunkedCache(4)]
    for cache in (*parts, kvcache.WrapperCache(*parts)):
        assert type(pickle.loads(pickle.dumps(cache))) is type(cache)


@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"])
def test_nothing_with_a_device_in_it_is_pickled(
    open_one: Callable[..., Any], way: Callable[..., Any]
) -> None:
    backend = open_one()
    ctx = backend.new_context()
    for thing, remedy in (
        (backend, "open one in each process"),
        (ctx, "make one in each process"),
        (ramp(ctx, 0), r"to_numpy\(\)"),
    ):
        with pytest.raises(ml.NotSupportedError, match=f"pickle: .*{remedy}"):
            way(thing)
    assert pickle.loads(pickle.dumps(ramp(ctx, 0, DType.BF16).to_numpy())).dtype == DType.BF16.numpy


# The end.


def test_close_gives_memory_back_to_the_device(open_one: Callable[..., Any]) -> None:
    """As the device counts it; where it is the host, other programs take and give at the same time."""
    backend, watcher = open_one(), open_one()
    if watcher.devices[0].kind == "cpu":
        pytest.skip("a host's free bytes are everyone's")
    tensor = backend.new_context().full((64 << 20,), 1, DType.F32)
    tensor.to_numpy()
    before = watcher.memory().devices[0].free
    del tensor
    gc.collect()
    backend.close()
    after = watcher.memory().devices[0].free
    assert after - before >= 200 << 20
