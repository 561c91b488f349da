"""The kernels that numba compiles: against a dense float64 reference, and what a cache does without them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ml
from backends import quantized_attention as host
from backends.quantized_attention import Codes, attend_codes
from kvcache import Batch, CausalCache
from ml.errors import BoundsError, ShapeError
from ml.ragged import RaggedPlan
from ml.testing.quantized import decoded, encoded
from ml.testing.ragged import ragged_reference, random_plan

pytest.importorskip("numba")
kernels = importlib.import_module("backends.quantized_kernel")
FORMATS = ("Q8_0", "Q4_0")


class Case:
    """Random queries and codes for a random plan; what no segment has is NaN."""

    def __init__(
        self, seed: int, tokens: int, cells: int, heads: tuple[int, int], dims: tuple[int, int],
        formats: tuple[str, str], *, sunk: bool = False, head_major: bool = False,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        self.plan, self.formats, self.scale = random_plan(seed, tokens, cells), formats, dims[0] ** -0.5
        self.query = rng.standard_normal((tokens, heads[0], dims[0])).astype(np.float32)
        self.sinks = rng.standard_normal(heads[0]).astype(np.float32) if sunk else None
        named = np.concatenate([self.plan.rows(number) for number in range(len(self.plan.segments))])
        self.parts = []
        for dim, name in zip(dims, formats, strict=True):
            codes, scales = encoded(rng.standard_normal((cells, heads[1], dim)).astype(np.float32), name)
            scales[np.setdiff1d(np.arange(cells), named)] = np.nan
            order = (1, 0, 2) if head_major else (0, 1, 2)
            laid = [np.ascontiguousarray(part.transpose(order)).transpose(order) for part in (codes, scales)]
            self.parts.append((laid[0], laid[1]))

    def codes(self) -> list[Codes]:
        found = [Codes.of(part, name) for part, name in zip(self.parts, self.formats, strict=True)]
        return [part for part in found if part is not None]

    def attend(self, threads: int = 1) -> np.ndarray:
        out = attend_codes(self.query * np.float32(self.scale), *self.codes(), self.plan, self.sinks, threads)
        assert out is not None
        return out

    def right(self) -> np.ndarray:
        read = [decoded(part, name) for part, name in zip(self.parts, self.formats, strict=True)]
        return ragged_reference(self.query, read[0], read[1], self.plan, self.scale, self.sinks)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_plans_over_codes_give_what_the_definition_says(data: Any) -> None:
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    case = Case(
        data.draw(st.integers(0, 10**6)), data.draw(st.integers(1, 40)), data.draw(st.integers(4, 400)),
        (kv_heads * group, kv_heads), (32 * data.draw(st.integers(1, 5)), 32 * data.draw(st.integers(1, 5))),
        (data.draw(st.sampled_from(FORMATS)), data.draw(st.sampled_from(FORMATS))),
        sunk=data.draw(st.booleans()), head_major=data.draw(st.booleans()),
    )  # fmt: skip
    np.testing.assert_allclose(case.attend(), case.right(), rtol=0, atol=2e-5)


def test_any_number_of_threads_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "WORTH", 1)
    asked: list[int] = []
    pool = host._pool
    monkeypatch.setattr(
        host, "_pool", lambda process, threads: asked.append(threads) or pool(process, threads)
    )
    case = Case(3, 5, 900, (8, 4), (64, 64), ("Q8_0", "Q4_0"), sunk=True)
    alone = case.attend(1)
    assert not asked
    for threads in (2, 3, 5):
        np.testing.assert_array_equal(case.attend(threads), alone)
    assert set(asked) == {1, 2, 4}


def test_scores_that_would_overflow_and_infinite_ones_are_as_in_the_definition() -> None:
    case = Case(4, 1, 40, (1, 1), (32, 32), ("Q8_0", "Q8_0"))
    case.plan = RaggedPlan(1, np.array([(0, 0, 40, 0, 1)]), np.array([(0, 0, 40)]), np.zeros(0))
    rng = np.random.default_rng(5)
    for i in (0, 1):
        case.parts[i] = encoded(rng.standard_normal((40, 1, 32)).astype(np.float32) * 30, "Q8_0")
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
    case = Case(6, 1, 8, (2, 1), (32, 32), ("Q8_0", "Q8_0"))
    case.plan = RaggedPlan(1, np.array(segments), np.array(readers), np.array(index, np.int32))
    with pytest.raises(BoundsError, match=message):
        case.attend()


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    case = Case(7, 2, 9, (2, 1), (32, 32), ("Q8_0", "Q8_0"))
    key, value = case.codes()
    for query, sinks in (
        (case.query[:1], None), (case.query[:, :, :16], None), (case.query, np.zeros(3, np.float32)),
    ):  # fmt: skip
        with pytest.raises(ShapeError):
            attend_codes(np.ascontiguousarray(query), key, value, case.plan, sinks, 1)
    with pytest.raises(ShapeError, match="scales"):
        Codes.of((case.parts[0][0], case.parts[0][1][:8]), "Q8_0")
    assert Codes.of(case.parts[0], "F8_E4M3") is None


# What a cache does with them.


def _decoding(name: str, cells: int) -> tuple[CausalCache, ml.Context]:
    """A cache in the pass of its last token."""
    cache, rng = CausalCache(), np.random.default_rng(8)
    backend = ml.open_backend(name)
    ctx = backend.new_context()
    cache.init(backend, ml.DType.Q8_0, 1, cells, cells)
    new = ctx.from_numpy(rng.standard_normal((cells - 1, 4, 64)).astype(np.float32))
    cache.start_forward(ctx, Batch(range(cells - 1), [0] * (cells - 1)))
    cache.put(ctx, new, new)
    cache.start_forward(ctx, Batch([cells - 1], [0]))
    one = ctx.from_numpy(rng.standard_normal((1, 4, 64)).astype(np.float32))
    cache.put(ctx, one, one)
    return cache, ctx


def test_a_step_takes_no_more_memory_than_a_block() -> None:
    """16 MiB as floats, of which no more than a sixteenth is there at a time."""
    cache, ctx = _decoding("numpy", 8192)
    query = ctx.from_numpy(np.ones((1, 8, 64), np.float32))
    cache.attend(ctx, query, 0.1)
    tracemalloc.start()
    try:
        cache.attend(ctx, query, 0.1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * 8192 * 4 * 64 * 4 / 16


BLOCKED = """
import sys
sys.modules["numba"] = None
import numpy as np, ml
from kvcache import Batch, CausalCache
with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
    cache = CausalCache()
    cache.init(backend, ml.DType.Q4_0, 1, 40, 40)
    x = np.random.default_rng(0).standard_normal((40, 2, 32)).astype(np.float32)
    for start, stop in ((0, 39), (39, 40)):
        cache.start_forward(ctx, Batch(range(start, stop), [0] * (stop - start)))
        new = ctx.from_numpy(x[start:stop])
        cache.put(ctx, new, new)
        out = cache.attend(ctx, new, 0.2)
    assert "backends.quantized_kernel" not in sys.modules
    np.save(sys.argv[1], out.to_numpy())
"""


def test_without_numba_a_cache_gives_the_same(tmp_path: Path) -> None:
    outs = []
    free = BLOCKED.replace('sys.modules["numba"] = None', "").replace("not in", "in")
    for number, text in enumerate((BLOCKED, free)):
        file = tmp_path / f"{number}.npy"
        subprocess.run([sys.executable, "-c", text, file], check=True, timeout=120)
        outs.append(np.load(file))
    np.testing.assert_allclose(outs[0], outs[1], rtol=0, atol=1e-5)


PLAIN = """
import sys, ml
from kvcache import Batch, CausalCache
backend = ml.open_backend("numpy")
ctx, cache = backend.new_context(), CausalCache()
cache.init(backend, ml.DType.F32, 1, 8, 8)
cache.start_forward(ctx, Batch([0], [0]))
x = ctx.zeros((1, 1, 32), ml.DType.F32)
cache.put(ctx, x, x)
cache.attend(ctx, x, 1.0)
assert not {"numba", "llvmlite"} & sys.modules.keys()
"""


def test_numba_is_imported_when_something_is_quantized_and_not_before() -> None:
    subprocess.run([sys.executable, "-c", PLAIN], check=True, timeout=60)


# Bugs in the kernels.


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("builder.sub(half, BYTES.all(8))", "builder.sub(half, BYTES.all(7))"),
        ("total[1] *= shrink", "total[1] *= ONE"),
    ],
    ids=["codes count from -7", "sums are not shrunk"],
)
def test_a_bug_in_a_kernel_is_seen(
    old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(str(kernels.__file__)).read_text().split("\n@_kernel(ROWS, ROWS, LISTED")[0]
    assert source.count(old) == 1
    file = tmp_path / "kernels_with_a_bug.py"
    file.write_text(source.replace(old, new).replace("cache=True, ", ""))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    broken = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(broken)
    monkeypatch.setattr(broken, "merge", kernels.merge, raising=False)
    monkeypatch.setattr(host, "kernels", lambda: broken)
    case = Case(11, 9, 700, (4, 2), (64, 64), ("Q8_0", "Q4_0"))
    assert not np.allclose(case.attend(), case.right(), rtol=0, atol=2e-5)
