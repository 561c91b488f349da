"""Attention on the CPU by numba: against a dense float64 reference, and what a cache does without it."""

from __future__ import annotations

import concurrent.futures
import copy
import ctypes
import functools
import importlib.util
import mmap
import os
import pickle
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ml
from backends import cpu_attention as host
from backends.cpu_attention import KINDS, Array, Stored, address, launch_of
from backends.numpy.backend import NumpyBackend
from kvcache import Batch, CausalCache
from ml.dtypes import DType
from ml.errors import BoundsError, ShapeError
from ml.ragged import RaggedPlan
from ml.testing.quantized import decoded, encoded
from ml.testing.ragged import ragged_reference, random_plan

from ..conftest import COMPILED
from ..rigs.each_backend import need_backend
from ..rigs.memory import peak_memory

pytest.importorskip("numba")
kernels = importlib.import_module("backends.cpu_kernels")
CODES = ("Q8_0", "Q4_0")


class Case:
    """Random queries, keys and values for a random plan; what no segment has is NaN."""

    def __init__(
        self, seed: int, tokens: int, cells: int, heads: tuple[int, int], dims: tuple[int, int],
        kinds: tuple[str, str], *, asked: str = "F32", sunk: bool = False, head_major: bool = False,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        self.plan, self.kinds, self.asked, self.scale = (
            random_plan(seed, tokens, cells), kinds, asked, dims[0] ** -0.5,
        )  # fmt: skip
        self.query = _stored(rng.standard_normal((tokens, heads[0], dims[0])), asked)[0]
        self.sinks = rng.standard_normal(heads[0]).astype(np.float32) if sunk else None
        named = np.concatenate([self.plan.rows(number) for number in range(len(self.plan.segments))])
        self.parts = []
        for dim, kind in zip(dims, kinds, strict=True):
            parts = _stored(rng.standard_normal((cells, heads[1], dim)), kind)
            parts[-1][np.setdiff1d(np.arange(cells), named)] = np.nan
            order = (1, 0, 2) if head_major else (0, 1, 2)
            self.parts.append([np.ascontiguousarray(x.transpose(order)).transpose(order) for x in parts])

    def given(self) -> list[Stored]:
        asked = [Array.of(self.query)], self.asked
        stored = (
            ([Array.of(x) for x in parts], kind) for parts, kind in zip(self.parts, self.kinds, strict=True)
        )
        found = [Stored.of(*one) for one in (asked, *stored)]
        return [one for one in found if one is not None]

    def attend(self, threads: int = 1) -> np.ndarray:
        query, key, value = self.given()
        out = np.full((*query.shape[:2], value.shape[2]), np.inf, np.float32)
        launch = launch_of("op", self.plan, query.shape, key.shape, value.shape)
        operands = query.arguments[:4], key.arguments, value.arguments
        launch.run(*operands, self.scale, self.sinks, threads, address(out))
        return out

    def right(self) -> np.ndarray:
        query, key, value = (
            _floats(x, kind)
            for x, kind in zip(([self.query], *self.parts), (self.asked, *self.kinds), strict=True)
        )
        return ragged_reference(query, key, value, self.plan, self.scale, self.sinks)


def _stored(values: np.ndarray, kind: str) -> list[np.ndarray]:
    if kind in CODES:
        return list(encoded(values.astype(np.float32), kind))
    return [values.astype(DType[kind].numpy)]


def _floats(parts: list[np.ndarray], kind: str) -> np.ndarray:
    return decoded((parts[0], parts[1]), kind) if kind in CODES else parts[0].astype(np.float32)


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_plans_give_what_the_definition_says(data: Any) -> None:
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    kinds = [data.draw(st.sampled_from(sorted(KINDS))) for _ in range(2)]
    dims = [
        data.draw(st.integers(1, 5)) * 32 if kind in CODES else data.draw(st.integers(1, 150))
        for kind in kinds
    ]
    case = Case(
        data.draw(st.integers(0, 10**6)), data.draw(st.integers(1, 90)), data.draw(st.integers(4, 600)),
        (kv_heads * group, kv_heads), (dims[0], dims[1]), (kinds[0], kinds[1]),
        asked=data.draw(st.sampled_from(["F32", "F16", "BF16"])), sunk=data.draw(st.booleans()),
        head_major=data.draw(st.booleans()),
    )  # fmt: skip
    np.testing.assert_allclose(case.attend(), case.right(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("kinds", [("F32", "F32"), ("Q8_0", "Q4_0")])
def test_any_number_of_threads_gives_the_same_bits(
    kinds: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "WORTH", 1)
    asked: list[int] = []
    pool = host._pool
    monkeypatch.setattr(
        host, "_pool", lambda process, threads: asked.append(threads) or pool(process, threads)
    )
    case = Case(3, 5, 900, (8, 4), (64, 64), kinds, sunk=True)
    alone = case.attend(1)
    assert not asked
    for threads in (2, 3, 5):
        np.testing.assert_array_equal(case.attend(threads), alone)
    assert set(asked) == {1, 2, 4}


def test_a_prompt_is_worth_a_thread_for_what_its_queries_see(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    pool = host._pool
    monkeypatch.setattr(
        host, "_pool", lambda process, threads: asked.append(threads) or pool(process, threads)
    )
    for tokens in (32, 512):
        case = Case(8, tokens, tokens, (4, 2), (16, 16), ("F32", "F32"))
        readers = [(i, 0, i + 1) for i in range(tokens)]
        case.plan = RaggedPlan(tokens, np.array([(0, 0, tokens, 0, tokens)]), np.array(readers), np.zeros(0))
        for part in case.parts:
            part[0][:] = np.nan_to_num(part[0], nan=0.5)
        np.testing.assert_allclose(case.attend(2), case.right(), rtol=0, atol=2e-5)
        assert asked == [1] * (tokens > 32)


@pytest.mark.parametrize("dim", [1, 5, 16, 24, 37])
@pytest.mark.parametrize("kind", ["F32", "F16"])
def test_nothing_behind_the_last_row_is_read(kind: str, dim: int) -> None:
    """The buffers end where memory that may not be read begins."""
    case = Case(9, 3, 70, (2, 2), (dim, dim), (kind, kind))
    held = []
    for i, (part,) in enumerate(case.parts):
        room = mmap.mmap(-1, 2 * mmap.PAGESIZE + -(-part.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        flat = np.frombuffer(room, np.uint8)
        guarded = address(flat) + flat.size - mmap.PAGESIZE
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(guarded), mmap.PAGESIZE, 0) == 0
        moved = flat[flat.size - mmap.PAGESIZE - part.nbytes :][: part.nbytes].view(part.dtype)
        moved = moved.reshape(part.shape)
        moved[:] = np.nan_to_num(part, nan=0.5)
        case.parts[i] = [moved]
        held.append((room, guarded))
    case.plan = RaggedPlan(
        3, np.array([(0, 0, 70, 0, 2), (1, 0, 3, 2, 3)]), np.array([(0, 0, 69), (1, 0, 70), (2, 0, 3)]),
        np.array([69, 3, 69]),
    )  # fmt: skip
    np.testing.assert_allclose(case.attend(), case.right(), rtol=0, atol=2e-5)
    for _, guarded in held:
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(guarded), mmap.PAGESIZE, 3)


def test_scores_that_would_overflow_and_infinite_ones_are_as_in_the_definition() -> None:
    case = Case(4, 1, 40, (1, 1), (32, 32), ("Q8_0", "Q8_0"))
    case.plan = RaggedPlan(1, np.array([(0, 0, 40, 0, 1)]), np.array([(0, 0, 40)]), np.zeros(0))
    rng = np.random.default_rng(5)
    for i in (0, 1):
        case.parts[i] = _stored(rng.standard_normal((40, 1, 32)) * 30, "Q8_0")
    case.query *= 100
    np.testing.assert_allclose(case.attend(), case.right(), rtol=1e-4, atol=1e-4)
    case.parts[0][1][7] = np.inf
    case.parts[0][0][7] = np.where(case.query[0] > 0, -1, 1)  # a score of -inf: weighs nothing
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(case.attend(), case.right(), rtol=1e-4, atol=1e-4)
    case.parts[0][0][7] *= -1
    assert np.isnan(case.attend()).all()
    case.parts[0][1][:] = np.inf
    case.parts[0][0][:] = np.where(case.query[0] > 0, -1, 1)
    assert np.isnan(case.attend()).all()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_nan_in_what_a_query_sees_is_in_its_result_and_in_no_other(kind: str) -> None:
    case = Case(5, 2, 60, (2, 1), (16, 16), (kind, kind))
    segments, readers = [(0, 0, 30, 0, 1), (0, 30, 30, 1, 2)], [(0, 0, 30), (1, 0, 30)]
    case.plan = RaggedPlan(2, np.array(segments), np.array(readers), np.zeros(0))
    for part in case.parts:
        part[0][:] = 1
    case.parts[1][0][40] = np.nan
    found = case.attend()
    assert np.isfinite(found[0]).all()
    assert np.isnan(found[1]).all()
    case.parts[1][0][40], case.parts[0][0][40] = 1, np.nan
    assert np.isnan(case.attend()[1]).all()


@pytest.mark.parametrize(
    ("segments", "readers", "index", "message"),
    [
        ([(0, 0, 9, 0, 1)], [(0, 0, 9)], [], "row 8 of 8"),
        ([(0, 0, 5, 0, 1)], [(0, 0, 6)], [], "outside of its segment"),
        ([(0, 0, 5, 0, 1)], [(0, -1, 3)], [], "outside of its segment"),
        ([(0, 0, 5, 0, 1)], [(0, 3, 3)], [], "or none"),
        ([(1, 0, 3, 0, 1)], [(0, 0, 3)], [1, 2], "no buffer has"),
        ([(1, 0, 2, 0, 1)], [(0, 0, 2)], [1, -1], "no buffer has"),
        ([(1, 0, 2, 0, 1)], [(0, 0, 2)], [1, 8], "row 8 of 8"),
        ([(0, -1, 5, 0, 1)], [(0, 0, 5)], [], "no buffer has"),
    ],
)
def test_a_plan_that_names_what_is_not_there_is_refused(
    segments: Any, readers: Any, index: Any, message: str
) -> None:
    case = Case(6, 1, 8, (2, 1), (32, 32), ("F32", "Q8_0"))
    case.plan = RaggedPlan(1, np.array(segments), np.array(readers), np.array(index, np.int32))
    with pytest.raises(BoundsError, match=message):
        case.attend()


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    case = Case(7, 2, 9, (2, 1), (32, 32), ("Q8_0", "F16"))
    whole, sinks = case.query, case.sinks
    for query, logits in ((whole[:1], sinks), (whole[:, :, :16], sinks), (whole, np.zeros(3, np.float32))):
        case.query, case.sinks = np.ascontiguousarray(query), logits
        with pytest.raises(ShapeError, match=r"^(op|ragged_attention): "):
            case.attend()
    with pytest.raises(ShapeError, match="scales"):
        Stored.of([Array.of(case.parts[0][0]), Array.of(case.parts[0][1][:8])], "Q8_0")
    assert Stored.of([Array.of(case.parts[0][0])], "F8_E4M3") is None
    assert Stored.of([Array.of(case.parts[1][0][:, :, ::2])], "F16") is None


# What backends and a cache do with them.


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_further_layers_of_a_plan_may_differ_from_those_before(name: str) -> None:
    need_backend(name)
    plan, rng = random_plan(9, 2, 40), np.random.default_rng(9)
    repeated = 0
    with ml.open_backend(name) as backend, backend.new_context() as ctx:
        kernel: Any = COMPILED if name == "numpy" else type(backend).ragged_attention

        def tensor(*shape: int, dtype: DType = DType.F32) -> ml.Tensor:
            return ctx.from_numpy(rng.standard_normal(shape).astype(np.float32), dtype)

        @functools.cache
        def stored(dtype: DType, dim: int, v_dim: int, cells: int) -> tuple[ml.Tensor, ml.Tensor]:
            return tensor(cells, 2, dim, dtype=dtype), tensor(cells, 2, v_dim, dtype=dtype)

        def layer(
            dtype: DType = DType.F32, heads: int = 4, dim: int = 32, v_dim: int = 16, cells: int = 40,
            sunk: bool = False, turned: bool = False,
        ) -> None:  # fmt: skip
            (key, value), query = stored(dtype, dim, v_dim, cells), tensor(2, heads, dim, dtype=dtype)
            if turned:
                query = tensor(dim, heads, 2, dtype=dtype).permute(ctx, 2, 1, 0)
            sinks = tensor(heads) if sunk else None
            nonlocal repeated
            again = None if plan.again is None or sunk else plan.again(ctx, query, key, value, 0.3)
            repeated += again is not None
            found = kernel(backend, ctx, query, key, value, plan, 0.3, sinks).to_numpy()
            if again is not None:
                np.testing.assert_array_equal(again.to_numpy(), found)
            operands = (x.to_numpy().astype(np.float32) for x in (query, key, value))
            right = ragged_reference(*operands, plan, 0.3, None if sinks is None else sinks.to_numpy())
            np.testing.assert_allclose(found.astype(np.float32), right, rtol=0, atol=0.03)

        unlike: list[dict[str, Any]] = [
            {}, {"dtype": DType.BF16}, {"heads": 2}, {"dim": 16}, {"v_dim": 32}, {"cells": 50},
            {"sunk": True}, {"turned": True},
        ]  # fmt: skip
        for changed in [*unlike, *unlike]:  # K and V have been read before only in the second round
            layer()
            layer(**changed)
            layer(**changed)
        assert repeated >= 2 * len(unlike)
        query, (key, value) = tensor(2, 4, 32), stored(DType.F32, 32, 16, 40)
        (half, _), (short, _) = stored(DType.BF16, 32, 16, 40), stored(DType.F32, 32, 16, 20)

        def attend(query: ml.Tensor, key: ml.Tensor) -> Any:
            layer()
            return kernel(backend, ctx, query, key, value, plan, 0.3)

        with pytest.raises(BoundsError, match="the plan refers to row"):
            layer(cells=20)
        with pytest.raises(ShapeError, match="KV heads"):
            attend(query, short)
        with pytest.raises(ShapeError, match="3 queries; the plan is for 2"):
            attend(tensor(3, 4, 32), key)
        assert attend(query, half) is attend(query.cast(ctx, DType.F16), key) is None
        with ml.open_backend(name) as other, other.new_context() as there:
            elsewhere, same = there.zeros((2, 4, 32), DType.F32), there.zeros(key.shape, DType.F32)
            assert kernel(other, there, elsewhere, same, same, plan, 0.3) is not None
            for operands in ((elsewhere, key), (query, same)):
                assert plan.again is not None
                assert plan.again(ctx, *operands, value, 0.3) is None
                with pytest.raises(ml.DeviceError, match="a tensor of"):
                    attend(*operands)


@pytest.mark.parametrize("what", ["context", "backend"])
@pytest.mark.parametrize("name", ["numpy", "torch", "mlx"])
def test_a_context_that_is_closed_between_layers_attends_no_more(name: str, what: str) -> None:
    need_backend(name)
    backend = ml.open_backend(name)
    ctx, cache = backend.new_context(), CausalCache()
    cache.init(backend, DType.F32, 1, 40, 40)
    new = ctx.zeros((40, 2, 16), DType.F32)
    cache.start_forward(ctx, Batch(range(40), [0] * 40))
    for layer in range(3):
        cache.set_layer(layer)
        cache.put(ctx, new, new)
    for layer in (0, 1):
        cache.set_layer(layer)
        cache.attend(ctx, new, 0.25)
    (ctx if what == "context" else backend).close()
    cache.set_layer(2)
    with pytest.raises(ml.ClosedError):
        cache.attend(ctx, new, 0.25)
    backend.close()


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_a_pass_taken_over_by_a_thread_attends_in_that_threads_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_backend(name)
    monkeypatch.setattr(NumpyBackend, "ragged_attention", COMPILED)
    rooms = set()
    with ml.open_backend(name) as backend, backend.new_context() as ctx:
        cache, new = CausalCache(), ctx.zeros((40, 2, 16), DType.F32)
        cache.init(backend, DType.F32, 1, 40, 40)
        cache.start_forward(ctx, Batch(range(40), [0] * 40))
        for layer in range(2):
            cache.set_layer(layer)
            cache.put(ctx, new, new)
        of = host._Room.of

        def noted(size: int) -> Any:
            rooms.add((threading.get_ident(), of(size).address))
            return of(size)

        def attend() -> None:
            cache.take_over()
            for layer in range(2):
                cache.set_layer(layer)
                cache.attend(ctx, new, 0.25)

        monkeypatch.setattr(host._Room, "of", noted)
        attend()
        other = threading.Thread(target=attend)
        other.start()
        other.join()
    assert len(rooms) == len(dict(rooms)) == 2


def test_an_interrupt_waits_for_the_threads_that_still_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "WORTH", 1)
    done: list[int] = []

    def attend(*call: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        time.sleep(0.05)
        done.append(1)

    slow = types.SimpleNamespace(**vars(kernels) | {"attend": attend})
    case, asked = Case(3, 5, 900, (8, 4), (64, 64), ("F32", "F32")), []

    def interrupted(others: Any) -> None:
        asked.append(others)
        if len(asked) == 1:  # by a second one
            raise KeyboardInterrupt
        concurrent.futures.wait(others)

    monkeypatch.setattr(host, "kernels", lambda: slow)
    monkeypatch.setattr(host, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        case.attend(3)
    assert len(asked) == len(done) == 2


def test_memory_that_a_further_layer_cannot_get_is_reported_as_at_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")

    def none_left(size: int) -> Any:
        raise MemoryError

    with ml.open_backend("torch") as backend, backend.new_context() as ctx:
        cache, new = CausalCache(), ctx.zeros((40, 2, 16), DType.F32)
        cache.init(backend, DType.F32, 1, 40, 40)
        cache.start_forward(ctx, Batch(range(40), [0] * 40))
        for layer in range(2):
            cache.set_layer(layer)
            cache.put(ctx, new, new)
        cache.set_layer(0)
        cache.attend(ctx, new, 0.25)
        monkeypatch.setattr(host._Room, "of", none_left)
        for layer in range(2):
            cache.set_layer(layer)
            with pytest.raises(ml.DeviceError, match="out of memory"):
                cache.attend(ctx, new, 0.25)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
def test_a_copied_plan_keeps_nothing_of_what_was_attended(copied: Any) -> None:
    case = Case(2, 4, 60, (4, 2), (32, 16), ("F32", "F32"))
    found = case.attend()
    plan = case.plan
    case.plan = copied(plan)
    assert plan.memo
    assert not case.plan.memo
    np.testing.assert_array_equal(case.attend(), found)


def test_a_step_takes_no_more_memory_than_a_block(numpy_backend: ml.Backend) -> None:
    """16 MiB as floats, of which no more than a sixteenth is there at a time."""
    cache, ctx = CausalCache(), numpy_backend.new_context()
    cache.init(numpy_backend, DType.Q8_0, 1, 8192, 8192)
    for positions in (range(8191), [8191]):
        new = ctx.from_numpy(np.random.default_rng(8).random((len(positions), 4, 64), np.float32))
        cache.start_forward(ctx, Batch(positions, [0] * len(positions)))
        cache.put(ctx, new, new)
    query = ctx.from_numpy(np.ones((1, 8, 64), np.float32))
    cache.attend(ctx, query, 0.1)
    with peak_memory() as most:
        cache.attend(ctx, query, 0.1)
        assert most() < 2 * 8192 * 4 * 64 * 4 / 16


ATTENDING = """
import sys
import numpy as np, ml
from kvcache import Batch, CausalCache
x, outs = np.random.default_rng(0).standard_normal((40, 2, 32)).astype(np.float32), []
with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
    for dtype in (ml.DType.F32, ml.DType.Q4_0):
        cache = CausalCache()
        cache.init(backend, dtype, 1, 40, 40)
        for start, stop in ((0, 39), (39, 40)):
            cache.start_forward(ctx, Batch(range(start, stop), [0] * (stop - start)))
            new = ctx.from_numpy(x[start:stop])
            cache.put(ctx, new, new)
            cache.get(ctx)
            assert outs or not [name for name in ("numba", "llvmlite") if sys.modules.get(name)]
            outs.append(cache.attend(ctx, new, 0.2).to_numpy()[-1])
            assert ("backends.cpu_kernels" in sys.modules) is FREE
np.save(sys.argv[1], outs)
"""
WARM = """
import importlib.util, sys, ml
from kvcache_engine.warm_up import warm_up
for name in ("numpy", "mlx")[: 1 + bool(importlib.util.find_spec("mlx"))]:
    with ml.open_backend(name) as backend:
        warm_up(backend)
        assert ("backends.cpu_kernels" in sys.modules) is FREE
"""


def _run(text: str, free: bool, *args: Path) -> None:
    """In a process of its own, where numba is installed or not."""
    blocked = "" if free else 'import sys\nsys.modules["numba"] = None\n'
    text = blocked + text.replace("FREE", str(free))
    subprocess.run([sys.executable, "-c", text, *args], check=True, timeout=120)


def test_numba_is_imported_by_attention_and_without_it_a_cache_gives_the_same(tmp_path: Path) -> None:
    files = tmp_path / "without.npy", tmp_path / "with.npy"
    for free, file in enumerate(files):
        _run(ATTENDING if free else ATTENDING + WARM, bool(free), file)
    np.testing.assert_allclose(*map(np.load, files), rtol=0, atol=1e-5)


def test_kernels_are_ready_before_anyone_waits_for_an_answer() -> None:
    _run(WARM, True)


# The other vectors.


def _changed(folder: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> Any:
    """The kernels with other text in what they are made of."""
    vectors, compiled = (
        (Path(host.__file__).parent / f"{name}.py").read_text() for name in ("cpu_vectors", "cpu_kernels")
    )
    assert vectors.count(old) == 1
    compiled = compiled.replace("from backends.cpu_vectors", "from changed_cpu_vectors")
    (folder / "changed_cpu_vectors.py").write_text(vectors.replace(old, new))
    (folder / "changed_cpu_kernels.py").write_text(compiled)
    monkeypatch.syspath_prepend(folder)
    return importlib.import_module("changed_cpu_kernels")


def test_vectors_of_the_other_length_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = 'binding.get_host_cpu_features().get("avx512f")'
    other = _changed(tmp_path, monkeypatch, choice, str(kernels.LANES == 8))
    assert other.LANES != kernels.LANES
    monkeypatch.setattr(host, "kernels", lambda: other)
    alike = (96, 32)
    for seed, (kinds, dims) in enumerate(
        [(("F32", "F32"), alike), (("F32", "F32"), (37, 21)), (("F16", "BF16"), alike), (CODES, alike)]
    ):
        case = Case(seed, 9, 300, (15, 3), dims, kinds, sunk=True)
        np.testing.assert_allclose(case.attend(), case.right(), rtol=0, atol=2e-5)


KERNEL = """
from numba import types
from backends.numba_options import kernel

@kernel(types.float64, fastmath=False, result=types.float64)
def half(x):
    return x / 2
"""


def test_the_first_process_says_that_it_compiles_and_later_ones_do_not(tmp_path: Path) -> None:
    (tmp_path / "module_of_kernels.py").write_text(KERNEL)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for expected in (1, 0):
        done = subprocess.run(
            [sys.executable, "-c", "import module_of_kernels as m; assert m.half(3.0) == 1.5"],
            env=environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stderr.count("compiling kernels for this processor") == expected, done.stderr
