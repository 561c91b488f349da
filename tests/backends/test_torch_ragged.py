"""Ragged attention of the torch backend: its Triton kernels against the definition.

On CUDA they run as they are, elsewhere in Triton's interpreter (see conftest.py), and anywhere they are
compiled for Hopper.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ml
from backends import cpu_attention
from kvcache import Batch, CausalCache
from ml.ragged import RaggedPlan
from ml.testing.quantized import decoded, encoded, laid_out
from ml.testing.ragged import ragged_reference, random_plan

torch = pytest.importorskip("torch")
if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed; there are no wheels but for Linux", allow_module_level=True)
if not (os.environ.get("TRITON_INTERPRET") or torch.cuda.is_available()):
    pytest.skip("there is a driver of NVIDIA's, and torch has no CUDA device", allow_module_level=True)

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from backends.torch import backend as torch_backend  # noqa: E402
from backends.torch import ragged, ragged_work, triton_launch  # noqa: E402
from backends.torch import triton_ragged as kernels  # noqa: E402
from backends.torch.quantized import attend_codes_on  # noqa: E402

from ..rigs.cuda_double import DeviceTensor, cuda_double  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")  # of the interpreter
TOLERANCE = {ml.DType.F32: 2e-5, ml.DType.F16: 4e-3, ml.DType.BF16: 3e-2}
Case = tuple[np.ndarray, np.ndarray, np.ndarray]


@pytest.fixture(scope="module")
def ctx() -> Iterator[Any]:
    with ml.open_backend("torch") as backend, backend.new_context() as ctx:
        yield ctx


@pytest.fixture(autouse=True)
def small_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two multiprocessors: small plans are divided as large ones are on a whole GPU."""
    monkeypatch.setattr(ragged, "kernels_on", lambda device: kernels)
    monkeypatch.setattr(ragged, "_multiprocessors", lambda device: 2)
    monkeypatch.setattr(ragged_work, "SHORTEST_CHUNK", 64)


def _case(seed: int, tokens: int, cells: int, heads: tuple[int, int], dims: tuple[int, int]) -> Case:
    rng = np.random.default_rng(seed)
    shapes = (tokens, heads[0], dims[0]), (cells, heads[1], dims[0]), (cells, heads[1], dims[1])
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return q, k, v


LAYOUTS = {"token_major": (0, 1, 2), "head_major": (1, 0, 2), "permuted": (1, 2, 0)}


def _laid_out(ctx: Any, array: np.ndarray, dtype: ml.DType, layout: str) -> Any:
    """(cells, heads, size) over memory in the order of ``layout``."""
    order = LAYOUTS[layout]
    stored = ctx.from_numpy(np.ascontiguousarray(array.transpose(order)), ml.DType.F32).cast(ctx, dtype)
    return stored.permute(ctx, *np.argsort(order).tolist())


def _attend(
    ctx: Any,
    case: Case,
    plan: RaggedPlan,
    dtype: ml.DType = ml.DType.F32,
    layouts: tuple[str, str] = ("head_major", "head_major"),
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """What the backend computes, and what is right for the same rounded inputs."""
    q, k, v = (_laid_out(ctx, x, dtype, at) for x, at in zip(case, ("token_major", *layouts), strict=True))
    scale = case[0].shape[2] ** -0.5
    logits = None if sinks is None else ctx.from_numpy(sinks, ml.DType.F32)
    given = [x.to_numpy().astype(np.float32) for x in (q, k, v)]
    with np.errstate(invalid="ignore"):  # the interpreter computes with NumPy
        out = ctx.backend.ragged_attention(ctx, q, k, v, plan, scale, logits)
        assert out.dtype is dtype
        return out.to_numpy().astype(np.float64), ragged_reference(*given, plan, scale, sinks)


def _plan(tokens: int, segments: Any, readers: Any, index: Any = ()) -> RaggedPlan:
    return RaggedPlan(tokens, np.array(segments), np.array(readers), np.array(index, dtype=np.int32))


def _shared_prefix(readers: int, prefix: int) -> RaggedPlan:
    """Everyone sees the prefix, and then one to three rows of their own."""
    own = [1 + i % 3 for i in range(readers)]
    segments = [(0, 0, prefix, 0, readers)]
    segments += [(0, prefix + 3 * i, n, readers + i, readers + i + 1) for i, n in enumerate(own)]
    bounds = [(i, 0, prefix) for i in range(readers)] + [(i, 0, n) for i, n in enumerate(own)]
    return _plan(readers, segments, bounds)


@pytest.mark.parametrize(
    ("heads", "dims", "dtype", "layouts", "sinks"),
    [
        ((4, 2), (8, 8), "F32", ("head_major", "head_major"), False),
        ((3, 3), (40, 24), "F32", ("token_major", "permuted"), True),
        ((4, 1), (64, 64), "F16", ("head_major", "permuted"), False),
        ((6, 2), (80, 80), "BF16", ("token_major", "token_major"), True),
        ((4, 2), (128, 64), "BF16", ("permuted", "head_major"), False),
        ((2, 2), (16, 40), "F16", ("permuted", "token_major"), True),
        ((36, 1), (144, 136), "F32", ("head_major", "head_major"), False),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_random_plans_give_what_the_definition_says(
    ctx: Any, heads: Any, dims: Any, dtype: str, layouts: Any, sinks: bool
) -> None:
    seed = sum(dims)
    logits = np.random.default_rng(seed).standard_normal(heads[0]).astype(np.float32) if sinks else None
    case = _case(seed, 3, 100, heads, dims)
    out, right = _attend(ctx, case, random_plan(seed, 3, 100), ml.DType[dtype], layouts, logits)
    np.testing.assert_allclose(out, right, atol=TOLERANCE[ml.DType[dtype]], rtol=0)


@pytest.mark.parametrize("sinks", [None, np.array([9, -np.inf], np.float32)], ids=["plain", "sinks"])
@pytest.mark.parametrize(("length", "work"), [(40, (1, 0, 0)), (590, (4, 1, 4))], ids=["short", "long"])
def test_a_long_segment_of_one_query_is_divided_and_merged(
    ctx: Any, length: int, work: Any, sinks: Any
) -> None:
    plan = _plan(1, [(0, 7, 600, 0, 1)], [(0, 3, length)])
    out, right = _attend(ctx, _case(1, 1, 610, (2, 1), (16, 16)), plan, sinks=sinks)
    ((kind, pack),) = plan.packers.items()
    made, _ = plan.lay(kind, pack)
    assert (made.items, made.merges, made.slots) == work
    np.testing.assert_allclose(out, right, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("sequences", "length"), [(1, 32768), (8, 8192), (8, 32768), (7, 32768), (64, 1024)])
def test_equal_sequences_fill_whole_waves_of_programs(sequences: int, length: int) -> None:
    """264 at once, as an H200 runs, for 8 KV heads: at most a tenth of these wait for the others."""
    count, longest = _divided([length] * sequences)
    waves = -(-count * 8 // 264)
    assert sequences * length * 8 >= 0.9 * 264 * waves * longest


def test_a_long_sequence_beside_short_ones_is_cut_as_if_it_were_alone() -> None:
    _, longest = _divided([*[100] * 63, 32768])
    assert 256 <= longest <= 1024


def _divided(lengths: Sequence[int]) -> tuple[int, int]:
    """One query behind each history, for 264 programs and 8 KV heads: how many items, and the longest."""
    starts = np.cumsum([0, *lengths[:-1]])
    segments = [(0, start, n, i, i + 1) for i, (start, n) in enumerate(zip(starts, lengths, strict=True))]
    plan = _plan(len(lengths), segments, [(i, 0, n) for i, n in enumerate(lengths)])
    work = ragged_work.divide(plan, ragged_work.choose_tile(plan, 4, 128, 128, 2), 264, 8)
    items = work.packed[work.packed[3] : work.packed[4]].reshape(-1, 8)
    return work.items, (items[:, 5] - items[:, 2]).max()


def test_a_prefix_of_64_readers_is_read_by_tiles_of_them(ctx: Any) -> None:
    plan = _shared_prefix(64, 96)
    tile = ragged_work.choose_tile(plan, 2, 16, 16, 4)
    work = ragged_work.divide(plan, tile, 1, 1)
    assert work.items == 64 + -(-64 // tile.readers)
    assert tile.readers > 8
    small = _shared_prefix(9, 96)
    out, right = _attend(ctx, _case(2, 9, 96 + 3 * 9, (2, 1), (16, 16)), small)
    np.testing.assert_allclose(out, right, atol=2e-5, rtol=0)


@pytest.mark.parametrize("listed", [False, True], ids=["run", "listed"])
def test_a_prompt_has_causal_bounds(ctx: Any, listed: bool) -> None:
    tokens, history = 70, 90
    rows = np.random.default_rng(3).permutation(100)[:history] if listed else ()
    bounds = [(i, 0, history - tokens + i + 1) for i in range(tokens)]
    plan = _plan(tokens, [(int(listed), 0 if listed else 5, history, 0, tokens)], bounds, rows)
    out, right = _attend(ctx, _case(3, tokens, 100, (2, 2), (16, 16)), plan, ml.DType.F16)
    np.testing.assert_allclose(out, right, atol=4e-3, rtol=0)


@pytest.mark.parametrize(("dtype", "poison"), [(ml.DType.F32, np.nan), (ml.DType.BF16, np.inf)])
def test_what_a_query_does_not_see_reaches_no_result_of_it(ctx: Any, dtype: ml.DType, poison: float) -> None:
    """Each query in turn: all else is poisoned, also what its neighbours in the same tile see."""
    plan = _plan(3, [(0, 2, 70, 0, 3), (1, 0, 3, 3, 4)],
                 [(0, 0, 70), (1, 0, 65), (2, 66, 68), (2, 1, 3)], [80, 75, 74])  # fmt: skip
    seen = {0: [*range(2, 72)], 1: [*range(2, 67)], 2: [68, 69, 75, 74]}
    clean = _case(4, 3, 84, (2, 1), (16, 16))
    _, right = _attend(ctx, clean, plan, dtype)
    for query in (1, 2):
        q, k, v = (x.copy() for x in clean)
        hidden = np.setdiff1d(np.arange(84), seen[query])
        k[hidden], v[hidden] = poison, poison
        out, _ = _attend(ctx, (q, k, v), plan, dtype)
        np.testing.assert_allclose(out[query], right[query], atol=TOLERANCE[dtype], rtol=0)
        assert not np.isfinite(out[0]).any()


def test_values_that_are_seen_and_not_finite_are_not_hidden(ctx: Any) -> None:
    plan = _plan(2, [(0, 0, 20, 0, 2)], [(0, 0, 20), (1, 0, 10)])
    q, k, v = _case(5, 2, 20, (1, 1), (16, 16))
    v[15, 0, 3], v[4, 0, 7] = np.inf, np.nan
    out, _ = _attend(ctx, (q, k, v), plan)
    assert np.argwhere(~np.isfinite(out)).tolist() == [[0, 0, 3], [0, 0, 7], [1, 0, 7]]


@pytest.mark.parametrize(
    ("heads", "dims", "dtype", "formats", "sinks"),
    [
        ((4, 2), (64, 32), "F32", ("Q8_0", "Q4_0"), True),
        ((3, 1), (32, 96), "F32", ("Q4_0", "Q8_0"), False),
        ((2, 2), (128, 64), "F16", ("Q8_0", "Q8_0"), False),
        ((6, 2), (64, 64), "BF16", ("Q4_0", "Q4_0"), True),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_codes_are_attended_to_as_what_they_stand_for(
    ctx: Any, heads: Any, dims: Any, dtype: str, formats: Any, sinks: bool
) -> None:
    """Rows without a segment have scales of NaN."""
    seed, kind = sum(dims), ml.DType[dtype]
    plan = random_plan(seed, 3, 100)
    q, k, v = _case(seed, 3, 100, heads, dims)
    logits = np.random.default_rng(seed).standard_normal(heads[0]).astype(np.float32) if sinks else None
    named = np.concatenate([plan.rows(number) for number in range(len(plan.segments))])
    parts, read = [], []
    for x, name, order in zip((k, v), formats, ((1, 0, 2), (0, 1, 2)), strict=True):
        codes, scales = encoded(x, name)
        read.append(decoded((codes, scales), name).astype(kind.numpy).astype(np.float64))
        scales[np.setdiff1d(np.arange(100), named)] = np.nan
        parts.append(laid_out(ctx, (codes, scales), order))
    query = ctx.from_numpy(q).cast(ctx, kind)
    sunk = None if logits is None else ctx.from_numpy(logits)
    scale = dims[0] ** -0.5
    with np.errstate(invalid="ignore"):
        out = attend_codes_on(ctx, query, *parts, formats, plan, scale, sunk)
    assert out is not None
    assert out.dtype is kind
    given = query.to_numpy().astype(np.float32)
    right = ragged_reference(given, read[0], read[1], plan, scale, logits)
    np.testing.assert_allclose(out.to_numpy().astype(np.float64), right, atol=TOLERANCE[kind], rtol=0)


def test_codes_of_formats_that_the_kernels_do_not_read_and_wrong_shapes(ctx: Any) -> None:
    plan = _plan(1, [(0, 0, 4, 0, 1)], [(0, 0, 4)])
    query = ctx.zeros((1, 2, 32), ml.DType.F32)
    codes, scales = ctx.zeros((4, 1, 32), ml.DType.I8), ctx.zeros((4, 1, 1), ml.DType.F16)
    stored = [codes, scales]
    attend = functools.partial(attend_codes_on, ctx, plan=plan, scale=1.0, sinks=None)
    assert attend(query, stored, stored, ("Q8_0", "F8_E4M3")) is None
    with pytest.raises(ml.ShapeError, match="codes"):
        attend(query, stored, stored, ("Q8_0", "Q4_0"))
    with pytest.raises(ml.ShapeError, match="one size"):
        attend(ctx.zeros((1, 2, 64), ml.DType.F32), stored, stored, ("Q8_0", "Q8_0"))


def test_two_launches_do_however_many_sequences(ctx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = _noted(monkeypatch, kernels.launch)
    for readers in (1, 6):
        _attend(ctx, _case(6, readers, 64 + 3 * readers, (1, 1), (16, 16)), _shared_prefix(readers, 64))
        assert launched == ["attend_items", "merge_parts"]
        launched.clear()
    _attend(ctx, _case(6, 2, 8, (1, 1), (16, 16)), _plan(2, [(0, 0, 8, 0, 2)], [(0, 0, 8), (1, 0, 8)]))
    assert launched == ["attend_items"]


def _noted(monkeypatch: pytest.MonkeyPatch, launch: Any) -> list[str]:
    """The names of the kernels that are launched from now on, by ``launch``."""
    launched: list[str] = []

    def note(function: Any, grid: tuple[int, ...], *given: Any) -> None:
        assert all(type(size) is int for size in grid)
        launched.append(function.fn.__name__)
        launch(function, grid, *given)

    monkeypatch.setattr(kernels, "launch", note)
    return launched


class Compiling:
    """A kernel whose launches are noted: whether Triton was asked, and what the compiled kernel was given."""

    def __init__(self) -> None:
        self.asked, self.given = 0, []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def ask(*args: Any, **options: Any) -> Compiling:
            self.asked += 1
            return self

        return ask if len(grid) == 2 else lambda *args: self.given.append((grid, *args))


CHANGES = {
    "nothing": {},
    "floats": {"floats": (0.5,)},
    "the grid": {"grid": (9, 9)},
    "an integer": {"integers": (1, 48)},
    "a dtype": {"tensors": (torch.zeros(8), torch.zeros(8, dtype=torch.float16))},
    "what memory is aligned to": {"tensors": (torch.zeros(8), torch.zeros(9)[1:])},
    "a constant": {"constants": {"HEADS": 4}},
    "warps": {"warps": 8},
    "stages": {"stages": 2},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_kernel_is_launched_again_unless_triton_would_compile_another(
    monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    monkeypatch.setattr(triton_launch, "INTERPRETED", False)
    monkeypatch.setattr(triton_launch, "CompiledKernel", Compiling)
    monkeypatch.setattr(triton_launch, "_compiled", {})
    kernel = Compiling()
    call: dict[str, Any] = {
        "function": kernel, "grid": (3, 2), "tensors": (torch.zeros(8), torch.zeros(8)), "floats": (0.25,),
        "integers": (1, 64), "constants": {"HEADS": 2}, "warps": 4, "stages": 3,
    }  # fmt: skip
    triton_launch.launch(**call)
    call |= CHANGES[change]
    triton_launch.launch(**call)
    if change not in ("nothing", "floats", "the grid"):
        assert (kernel.asked, kernel.given) == (2, [])
        return
    places = [tensor.data_ptr() for tensor in call["tensors"]]
    assert kernel.asked == 1
    assert kernel.given == [((*call["grid"], 1), *places, *call["floats"], 1, 64, 2)]


class Operations(TorchDispatchMode):
    """Notes what torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_layers_share_one_upload_and_none_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without memory of a device that is not there."""
    done = _noted(monkeypatch, lambda *_: None)
    monkeypatch.setattr(torch_backend, "fill_from_host", lambda *_: done.append("upload"))
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: contextlib.nullcontext())
    plan = _shared_prefix(3, 80)
    with ml.open_backend("torch", device="cpu") as backend, backend.new_context() as ctx, FakeTensorMode():
        ctx.torch_device = torch.device("cuda", 0)
        q, k, v = (ctx.empty((n, heads, 16), ml.DType.F32) for n, heads in ((3, 4), (90, 2), (90, 2)))
        with Operations() as operations:
            for _ in range(3):
                out = backend.ragged_attention(ctx, q, k, v, plan, 0.25)
        assert (out.shape, out.native.device.type) == ((3, 4, 16), "cuda")
    assert done == ["upload"] + ["attend_items", "merge_parts"] * 3
    assert operations.seen == {"empty", "new_empty"}


@pytest.mark.skipif(not kernels.INTERPRETED, reason="compiled kernels do not run on the double's memory")
def test_a_pass_uploads_its_cells_and_its_plan_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers and three sequences of different lengths; the first pass does not know what will be read."""

    def attend(*given: Any) -> Any:
        values = [x.inner if isinstance(x, DeviceTensor) else x for x in given]
        with torch.utils._python_dispatch._disable_current_modes(), np.errstate(invalid="ignore"):
            return DeviceTensor(kernels.attend(*values), given[0].device)

    monkeypatch.setattr(ragged, "kernels_on", lambda device: types.SimpleNamespace(attend=attend))
    found: list[list[np.ndarray]] = []
    with cuda_double(1) as transfers:
        for device in ("cuda", "cpu"):
            rng, outs = np.random.default_rng(3), []
            with ml.open_backend("torch", device=device) as backend, backend.new_context() as ctx:
                if device == "cpu":
                    monkeypatch.setattr(ragged, "kernels_on", lambda device: None)
                cache = CausalCache()
                cache.init(backend, ml.DType.F32, 3, 64, 64)
                for step in range(4):
                    places = [
                        (s, p) for s in range(3) for p in ([9 * s + step + 9] if step else range(9 * s + 10))
                    ]
                    rows = [rng.standard_normal((len(places), heads, 16)) for heads in (2, 2, 4)]
                    key, value, query = (ctx.from_numpy(x.astype(np.float32)) for x in rows)
                    transfers.clear()
                    cache.start_forward(ctx, Batch([p for _, p in places], [s for s, _ in places]))
                    for layer in range(2):
                        cache.set_layer(layer)
                        cache.put(ctx, key, value)
                        outs.append(cache.attend(ctx, query, 0.25))
                    assert transfers.waits == []
                    assert len(transfers.log) == (0 if device == "cpu" else 1)
                found.append([out.to_numpy() for out in outs])
    np.testing.assert_allclose(np.concatenate(found[0]), np.concatenate(found[1]), atol=2e-5, rtol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_nothing_waits_for_it(ctx: Any) -> None:
    """The first time compiles; the second uploads a plan and launches while torch refuses to wait."""
    case = _case(7, 3, 90, (4, 2), (64, 64))
    _attend(ctx, case, _shared_prefix(3, 80))
    q, k, v = (ctx.from_numpy(x) for x in case)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = ctx.backend.ragged_attention(ctx, q, k, v, _shared_prefix(3, 80), 0.125)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    right = ragged_reference(*case, _shared_prefix(3, 80), 0.125)
    np.testing.assert_allclose(out.to_numpy(), right, atol=2e-5, rtol=0)


@pytest.mark.parametrize("seed", range(40))
def test_the_work_is_the_plan(seed: int) -> None:
    """Each query meets each of its rows once; slots are each query's own; whole blocks are seen by all."""
    tokens = 1 + seed % 13
    plan = random_plan(seed, tokens, 40 + 30 * seed)
    tile = ragged_work.Tile(16, 1 + seed % 5, (16, 64)[seed % 2], 4, 2)
    work = ragged_work.divide(plan, tile, 8, 1)
    count, merged, slots, items_at, pairs_at, merges_at, index_at, _ = work.packed[:8].tolist()
    assert (count, merged, slots) == (work.items, work.merges, work.slots)
    items = work.packed[items_at:pairs_at].reshape(count, 8)
    pairs = work.packed[pairs_at:merges_at].reshape(-1, 4)
    assert work.packed[index_at:].tolist() == plan.index.tolist()
    met: dict[int, list[int]] = {query: [] for query in range(tokens)}
    owned: dict[int, list[int]] = {query: [] for query in range(tokens)}
    for gathered, start, low, first, stop, high, pair, readers in items.tolist():
        assert low <= first <= stop <= high
        assert (stop - first) % tile.keys == 0
        assert 1 <= readers <= tile.readers
        places = np.arange(start + low, start + high)
        rows = plan.index[places] if gathered else places
        for query, begin, end, slot in pairs[pair : pair + readers].tolist():
            shown = rows[max(begin - low, 0) : max(end - low, 0)].tolist()
            assert begin <= first or first == stop
            assert stop <= end or first == stop
            assert (slot == -2) == (not shown)
            met[query] += shown
            owned[query] += [slot] if slot != -2 else []
    for number, (_, _, _, start, stop) in enumerate(plan.segments.tolist()):
        for query, begin, end in plan.readers[start:stop].tolist():
            for row in plan.rows(number)[begin:end].tolist():
                met[query].remove(row)
    assert not any(met.values())
    merges = {q: range(a, b) for q, a, b in work.packed[merges_at:index_at].reshape(-1, 3).tolist()}
    assert {q: sorted(s) for q, s in owned.items()} == {q: [*merges.get(q, [-1])] for q in owned}
    assert sorted(s for q in merges for s in owned[q]) == list(range(slots))


def test_a_device_without_the_kernels_leaves_it_to_partial_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(cpu_attention, "kernels", lambda: None)
    with ml.open_backend("torch", device="cpu") as backend, backend.new_context() as ctx:
        tensors = [ctx.zeros((2, 1, 16), ml.DType.F32)] * 3
        plan = _plan(2, [(0, 0, 2, 0, 2)], [(0, 0, 1), (1, 0, 2)])
        assert backend.ragged_attention(ctx, *tensors, plan, 1.0) is None


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"k": (7, 1, 16)}, ml.BoundsError, "row 7 of 7"),
        ({"q": (3, 1, 16)}, ml.ShapeError, "3 queries; the plan is for 2"),
        ({"q": (2, 1, 8)}, ml.ShapeError, "one head size"),
        ({"sinks": (2,)}, ml.ShapeError, "sinks"),
        ({"readers": [(0, 0, 9), (1, 0, 8)]}, ml.BoundsError, "outside of its segment"),
        ({"readers": [(0, 3, 3), (1, 0, 8)]}, ml.BoundsError, "sees no rows"),
        ({"index": [0, 1, 2]}, ml.BoundsError, "outside of its index"),
    ],
)
def test_what_would_read_elsewhere_is_refused(ctx: Any, changed: Any, error: type, says: str) -> None:
    shapes = {"q": (2, 1, 16), "k": (8, 1, 16), "v": changed.get("k", (8, 1, 16)), "sinks": None} | changed
    given = {n: shapes[n] and ctx.zeros(shapes[n], ml.DType.F32) for n in ("q", "k", "v", "sinks")}
    bounds, index = changed.get("readers", [(0, 0, 8), (1, 0, 8)]), changed.get("index", ())
    plan = _plan(2, [(len(index) and 1, 0, 8, 0, 2)], bounds, index)
    with pytest.raises(error, match=says):
        ctx.backend.ragged_attention(ctx, given["q"], given["k"], given["v"], plan, 1.0, given["sinks"])


def test_the_kernels_compile_for_hopper(tmp_path: Path) -> None:
    """In a process of its own, where nothing is interpreted; no GPU takes part."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "TRITON_CACHE_DIR": str(tmp_path)
    }
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    script = Path(__file__).with_name("compile_ragged.py")
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["F16", "BF16", "F32", "codes", "merge"]
