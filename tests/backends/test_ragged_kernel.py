"""The kernels of ragged batches without a GPU: emulated as backends launch them, and compiled for CUDA."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ml
from backends.ragged_kernel import KEYS, PARTS, SHORTEST, Shape, layout
from ml.dtypes import DType
from ml.ragged import RaggedPlan
from ml.testing.ragged import ragged_reference, random_plan
from ml.testing.samples import FLOATS, exact, normal

from ..needs import wanting
from ..rigs.cupy_double import module
from .kernel_emulator import mlx_kernel

ours = module.ragged_attention.__globals__
"""Of backends.cupy.ragged, on the double."""

SHAPES = {
    "one head": Shape(1, 1, 8, 8, False),
    "grouped": Shape(8, 2, 64, 64, True),
    "group larger than a block": Shape(20, 1, 16, 16, False),
    "wide heads": Shape(6, 2, 576, 512, False),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("seed", range(20))
def test_every_pair_of_a_query_and_a_row_is_in_one_task_and_has_one_slot(shape: Shape, seed: int) -> None:
    plan = random_plan(seed, 1 + 7 * seed, 40 * (seed + 1) ** 2)
    work, tasks, slots = layout(plan, shape.rows // shape.span, shape.blocks)
    chunk, slot_starts, edges = work[:3].tolist()
    assert chunk % KEYS == 0
    assert chunk >= SHORTEST
    seen = [np.zeros(end - begin, int) for _, begin, end in plan.readers.tolist()]
    taken = np.zeros(slots, int)
    for segment, first, stop, number in work[8:slot_starts].reshape(tasks, 4).tolist():
        assert plan.segments[segment, 3] <= first < stop <= plan.segments[segment, 4]
        assert stop - first <= shape.rows // shape.span
        for reader in range(first, stop):
            query, begin, end = plan.readers[reader].tolist()
            low, high = max(begin, number * chunk), min(end, (number + 1) * chunk)
            if low < high:
                seen[reader][low - begin : high - begin] += 1
                slot = work[slot_starts + reader] + number - begin // chunk
                assert work[edges + query] <= slot < work[edges + query + 1]
                taken[slot] += 1
    assert all((rows == 1).all() for rows in seen)
    assert (taken == 1).all()


# What the kernels compute, launched as each backend launches them.


Attend = Callable[..., tuple[np.ndarray, np.ndarray]]


@pytest.fixture
def cupy_attend() -> Iterator[Attend]:
    with module.CupyBackend() as backend:
        yield functools.partial(attended, backend.new_context(), backend.ragged_attention)


@pytest.fixture(params=["metal", "cuda"])
def mlx_attend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attend]:
    mx = pytest.importorskip("mlx.core")
    from backends.mlx import ragged

    monkeypatch.setattr(mx.metal, "is_available", lambda: request.param == "metal")
    monkeypatch.setattr(mx.fast, f"{request.param}_kernel", mlx_kernel(request.param))
    ragged._kernel.cache_clear()
    with ml.open_backend("mlx", device="cpu") as backend:
        yield functools.partial(attended, backend.new_context(), ragged.ragged_attention)
    ragged._kernel.cache_clear()


def attended(
    ctx: Any, attend: Any, shape: Shape, plan: RaggedPlan, cells: int, dtype: DType = DType.F32,
    poison: tuple[int, ...] = (), spread: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """What the kernels give and what the definition does, of keys by head and values by element."""
    q = normal((plan.tokens, shape.heads, shape.head_dim), dtype, 1, spread)
    k = normal((cells, shape.kv_heads, shape.head_dim), dtype, 2, spread)
    v = normal((cells, shape.kv_heads, shape.v_dim), dtype, 3)
    k[list(poison)] = v[list(poison)] = np.nan
    sinks = normal((shape.heads,), dtype, 4) if shape.sinks else None
    key = ctx.from_numpy(k.transpose(1, 0, 2)).permute(ctx, 1, 0, 2)
    value = ctx.from_numpy(v.transpose(1, 2, 0)).permute(ctx, 2, 0, 1)
    logits = None if sinks is None else ctx.from_numpy(sinks)
    out = attend(ctx, ctx.from_numpy(q), key, value, plan, shape.head_dim**-0.5, logits)
    assert (out.dtype, out.shape) == (dtype, (plan.tokens, shape.heads, shape.v_dim))
    return exact(out.to_numpy()), ragged_reference(q, k, v, plan, shape.head_dim**-0.5, sinks)


def assert_close(pair: tuple[np.ndarray, np.ndarray], dtype: DType = DType.F32) -> None:
    tolerance = {DType.F32: 1e-5, DType.F16: 2e-3, DType.BF16: 2e-2}[dtype]
    np.testing.assert_allclose(*pair, rtol=tolerance, atol=tolerance)


def prompts(*lengths: int, shared: int = 0) -> RaggedPlan:
    """Sequences of one pass behind a prefix that they share: each token sees it and what it follows."""
    starts = np.cumsum([shared, *lengths])
    tokens = sum(lengths)
    readers = [(token, 0, shared) for token in range(tokens)] if shared else []
    segments = [(0, 0, shared, 0, tokens)] if shared else []
    for start, length in zip(starts.tolist(), lengths, strict=False):
        segments.append((0, start, length, len(readers), len(readers) + length))
        readers += [(start - shared + i, 0, i + 1) for i in range(length)]
    return RaggedPlan(tokens, np.array(segments), np.array(readers), np.zeros(0, np.int32))


@pytest.mark.parametrize("dtype", FLOATS)
def test_mlx_launches_what_the_plan_says(mlx_attend: Attend, dtype: DType) -> None:
    for seed, tokens, cells in ((1, 1, 9), (2, 7, 80))[dtype is not FLOATS[0] :]:
        plan = random_plan(seed, tokens, cells)
        assert_close(mlx_attend(Shape(4, 2, 8, 6, True), plan, cells, dtype), dtype)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_every_shape_of_heads_is_attended_with(cupy_attend: Attend, shape: Shape) -> None:
    assert_close(cupy_attend(shape, random_plan(5, 5, 70), 70))
    assert_close(cupy_attend(shape, prompts(3, 9, shared=40), 52))


@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ((0, 4, 8), (9, 2, 8), (9, 2, 8)),
        ((1, 4, 8), (9, 2, 8), (9, 2, 0)),
        ((1, 3, 8), (9, 2, 8), (9, 2, 8)),
        ((1, 4, 1032), (9, 2, 1032), (9, 2, 8)),
    ],
    ids=["no tokens", "no values", "heads that do not divide", "large heads"],
)
def test_what_the_kernels_do_not_do_is_left_to_the_caller(query: Any, key: Any, value: Any) -> None:
    with module.CupyBackend() as backend:
        ctx = backend.new_context()
        made = [ctx.zeros(shape, DType.F32) for shape in (query, key, value)]
        assert backend.ragged_attention(ctx, *made, random_plan(1, 1, 9), 1.0) is None
        narrow = ctx.zeros((1, 4, 8), DType.F16), *made[1:]
        assert backend.ragged_attention(ctx, *narrow, random_plan(1, 1, 9), 1.0) is None


@pytest.mark.parametrize("sinks", [(1,), (8,), (4, 1)])
def test_sinks_are_one_for_each_head(sinks: tuple[int, ...]) -> None:
    with module.CupyBackend() as backend:
        ctx = backend.new_context()
        made = [ctx.zeros(shape, DType.F32) for shape in ((1, 4, 8), (9, 2, 8), (9, 2, 8), sinks)]
        with pytest.raises(ml.ShapeError, match="one for each head"):
            backend.ragged_attention(ctx, *made[:3], random_plan(1, 1, 9), 1.0, made[3])


def test_long_histories_are_cut_and_merged(cupy_attend: Attend) -> None:
    """By several readers at once, some of which see nothing of some chunks."""
    cells, shape = 5 * SHORTEST, SHAPES["one head"]
    plan = RaggedPlan(
        3,
        np.array([(0, 0, cells - 7, 0, 3), (0, cells - 7, 7, 3, 4)]),
        np.array([(0, 0, 3), (1, SHORTEST - 1, cells - 7), (2, 700, 701), (2, 2, 5)]),
        np.zeros(0, np.int32),
    )
    assert layout(plan, 16, 1)[2] > 6
    assert_close(cupy_attend(shape, plan, cells))


def test_what_another_reader_sees_reaches_no_result(cupy_attend: Attend) -> None:
    shape, plan = SHAPES["one head"], prompts(40)
    result, expected = cupy_attend(shape, plan, 40, poison=(35,))
    np.testing.assert_allclose(result[:35], expected[:35], rtol=1e-5, atol=1e-5)
    assert np.isnan(result[35:]).all()


def test_large_scores_do_not_overflow(cupy_attend: Attend) -> None:
    result, expected = cupy_attend(SHAPES["one head"], random_plan(6, 4, 60), 60, spread=100.0)
    np.testing.assert_allclose(result, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("barrier", range(PARTS.count("BARRIER();")))
def test_each_barrier_is_needed(cupy_attend: Attend, monkeypatch: pytest.MonkeyPatch, barrier: int) -> None:
    """And the emulator notices one that is not there."""
    before, after = (list(part) for part in np.split(np.array(PARTS.split("BARRIER();")), [barrier + 1]))
    monkeypatch.setitem(ours, "PARTS", "BARRIER();".join(before) + ";" + "BARRIER();".join(after))
    ours["_module"].cache_clear()
    with pytest.raises((AssertionError, ml.DeviceError)):
        assert_close(cupy_attend(Shape(4, 2, 80, 24, False), random_plan(3, 9, 300), 300))
    ours["_module"].cache_clear()


# What a compiler for GPUs says.


@pytest.mark.parametrize("dtype", FLOATS)
def test_nvrtc_compiles_the_kernels_of_cupy(dtype: DType) -> None:
    for shape in SHAPES.values():
        ptx = compiled_for_cuda(ours["source"](dtype, shape))
        assert ".entry ragged_parts(" in ptx
        assert ".entry ragged_merge(" in ptx


def compiled_for_cuda(source: str) -> str:
    """PTX for sm_90, by NVRTC."""
    spec = importlib.util.find_spec("nvidia")
    found = [file for place in (spec.submodule_search_locations or () if spec else ())
             for file in Path(place).glob("cuda_nvrtc/lib/libnvrtc.so.*")]  # fmt: skip
    if not found:
        pytest.skip(wanting("NVRTC", "pip install nvidia-cuda-nvrtc-cu12 (90 MB, needs no GPU)"))
    nvrtc = ctypes.CDLL(str(found[0]))
    program, options = ctypes.c_void_p(), (ctypes.c_char_p * 2)(b"--gpu-architecture=sm_90", b"-std=c++17")
    size = ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"ragged.cu", 0, None, None)
    failed = nvrtc.nvrtcCompileProgram(program, 2, options)
    part = "ProgramLog" if failed else "PTX"
    getattr(nvrtc, f"nvrtcGet{part}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{part}")(program, text)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    assert not failed, text.value.decode()
    return text.value.decode()
