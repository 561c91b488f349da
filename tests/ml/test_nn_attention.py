"""ml.nn.attention against the float64 reference of the suite, also on a backend with a kernel of its own."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

import ml
from ml import DType, nn
from ml.testing.attention import causal_matrix, reference

from ..rigs.each_backend import each_context, runnable

partial_module = importlib.import_module("ml.nn.partial")

ctx = each_context("numpy", "torch")


def tensors(
    ctx: ml.Context, tokens: int, history: int, heads: int = 4, kv_heads: int = 2, dim: int = 8,
    v_dim: int = 8, dtype: DType = DType.F32,
) -> tuple[ml.Tensor, ml.Tensor, ml.Tensor]:  # fmt: skip
    rng = np.random.default_rng(0)
    shapes = (tokens, heads, dim), (history, kv_heads, dim), (history, kv_heads, v_dim)
    q, k, v = (ctx.from_numpy(rng.standard_normal(shape), dtype) for shape in shapes)
    return q, k, v


def host(*values: ml.Tensor) -> list[np.ndarray]:
    return [value.to_numpy().astype(np.float64) for value in values]


every_kind_of_mask = pytest.mark.parametrize("kind", ["none", "causal", "mask"])


class TestValues:
    """What the suite, which asks a backend, does not ask of ``nn.attention``."""

    def test_default_scale(self, ctx: ml.Context) -> None:
        q, k, v = tensors(ctx, 2, 5)
        expected = reference(*host(q, k, v), None, 8**-0.5)
        np.testing.assert_allclose(nn.attention(ctx, q, k, v).to_numpy(), expected, rtol=0, atol=2e-6)

    @pytest.mark.parametrize("attend", [nn.attention, nn.generic_attention])
    def test_sinks_of_nothing_and_of_nearly_all_the_weight(self, ctx: ml.Context, attend: Any) -> None:
        q, k, v = tensors(ctx, 3, 5, heads=6, kv_heads=2)
        logits = np.array([-np.inf, -1.0, 0.0, 1.0, 4.0, 60.0], np.float32)
        got = attend(ctx, q, k, v, ml.CAUSAL, 0.5, ctx.from_numpy(logits)).to_numpy()
        expected = reference(*host(q, k, v), causal_matrix(3, 5), 0.5, logits)
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6)
        assert abs(got[:, 5]).max() < 1e-6

    def test_cache_narrower_than_the_activations(self, ctx: ml.Context) -> None:
        q, k, v = tensors(ctx, 3, 5)
        narrow = [x.cast(ctx, DType.F16) for x in (k, v)]
        got = nn.attention(ctx, q, *narrow, ml.CAUSAL)
        assert got.dtype is DType.F32
        expected = reference(*host(q, *narrow), causal_matrix(3, 5), 8**-0.5)
        np.testing.assert_allclose(got.to_numpy(), expected, rtol=0, atol=5e-3)

    @pytest.mark.parametrize("attend", [nn.attention, nn.generic_attention])
    def test_no_queries(self, ctx: ml.Context, attend: Any) -> None:
        q, k, v = tensors(ctx, 0, 4)
        assert attend(ctx, q, k, v, None, 1.0).shape == (0, 4, 8)


@every_kind_of_mask
def test_long_prompts_go_in_blocks(ctx: ml.Context, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Blocks of 3 queries out of 8 give what one block gives."""
    q, k, v = tensors(ctx, 8, 10)
    matrix = ctx.from_numpy(causal_matrix(8, 10))
    mask: Any = {"none": None, "causal": ml.CAUSAL, "mask": matrix}[kind]
    logits = ctx.from_numpy(np.arange(4), DType.F32)
    whole = nn.generic_attention(ctx, q, k, v, mask, 0.4, logits).to_numpy()
    monkeypatch.setattr(importlib.import_module("ml.nn.attention"), "SCORES_LIMIT", 4 * 10 * 3)
    blocks = nn.generic_attention(ctx, q, k, v, mask, 0.4, logits).to_numpy()
    np.testing.assert_allclose(blocks, whole, rtol=0, atol=1e-6)


@every_kind_of_mask
def test_long_parts_go_in_blocks(ctx: ml.Context, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Blocks of 3 queries out of 8, of each of two batches, give what one block gives."""
    rng = np.random.default_rng(5)
    q, k, v = (
        ctx.from_numpy(rng.standard_normal(shape).astype(np.float32))
        for shape in ((2, 8, 4, 8), (2, 10, 2, 8), (2, 10, 2, 6))
    )
    matrix = np.where(rng.random((2, 9, 10)) < 0.5, 0, -2).astype(np.float32)
    mask: Any = {"none": None, "causal": ml.CAUSAL, "mask": ctx.from_numpy(matrix)}[kind]
    whole = [x.to_numpy() for x in nn.partial_attention(ctx, q, k, v, mask, 0.4)]
    rows: list[int] = []
    original = partial_module._attend_to_part

    def spy(ctx: Any, scale: float, query: Any, *rest: Any) -> Any:
        rows.append(query.shape[1])
        return original(ctx, scale, query, *rest)

    monkeypatch.setattr(partial_module, "_attend_to_part", spy)
    monkeypatch.setattr(partial_module, "SCORES_LIMIT", 2 * 4 * 10 * 3)
    blocks = [x.to_numpy() for x in nn.generic_partial_attention(ctx, q, k, v, mask, 0.4)]
    assert rows == [3, 3, 2]
    for found, expected in zip(blocks, whole, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_the_history_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """On NumPy, what attention allocates for one query does not grow with the size of the values."""
    with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
        q, k, v = tensors(ctx, 1, 64)
        copied: list[tuple[int, ...]] = []
        for name in ("contiguous", "cast", "copy", "concat"):
            original = getattr(type(k), name)

            def spy(self: Any, *args: Any, _original: Any = original) -> Any:
                copied.append(self.shape)
                return _original(self, *args)

            monkeypatch.setattr(type(k), name, spy)
        nn.attention(ctx, q, k, v, ctx.zeros((1, 64), DType.F32))
    assert copied == []


class TestDispatch:
    def test_backend_with_a_kernel_is_asked(self) -> None:
        from backends.numpy.backend import NumpyBackend

        calls: list[Any] = []

        class Fused(NumpyBackend):
            def attention(self, ctx: Any, query: Any, key: Any, value: Any, mask: Any, scale: float,
                          sinks: Any = None) -> Any:  # fmt: skip
                calls.append((query.dtype, mask, scale))
                return query

        with Fused() as backend, backend.new_context() as ctx:
            q, k, v = tensors(ctx, 1, 4)
            assert nn.attention(ctx, q, k, v, ml.CAUSAL, 0.5) is q
            half = [x.cast(ctx, DType.F16) for x in (k, v)]
            assert nn.attention(ctx, q, *half).dtype is DType.F32
        # One query sees every key, so CAUSAL says nothing; the query comes in the dtype of the keys.
        assert calls == [(DType.F32, None, 0.5), (DType.F16, None, pytest.approx(8**-0.5))]


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "error", "says"),
        [
            ({"q": (3, 4)}, ml.ShapeError, "each must be"),
            ({"q": (3, 4, 6)}, ml.ShapeError, "key must be"),
            ({"k": (6, 2, 8)}, ml.ShapeError, "value"),
            ({"v": (5, 1, 8)}, ml.ShapeError, "value"),
            ({"q": (3, 5, 8)}, ml.ShapeError, "multiple"),
            ({"k": (5, 0, 8), "v": (5, 0, 8)}, ml.ShapeError, "multiple"),
            ({"k": (0, 2, 8), "v": (0, 2, 8)}, ml.ShapeError, "no keys"),
            ({"mask": (2, 5)}, ml.ShapeError, "rows >= 3"),
            ({"mask": (3, 4)}, ml.ShapeError, "mask"),
            ({"mask": (5,)}, ml.ShapeError, "mask"),
            ({"sinks": (2,)}, ml.ShapeError, "sinks"),
        ],
    )
    def test_shapes(self, ctx: ml.Context, change: dict[str, Any], error: type, says: str) -> None:
        shapes = {"q": (3, 4, 8), "k": (5, 2, 8), "v": (5, 2, 8), "mask": (3, 5), "sinks": (4,)} | change
        given = {name: ctx.zeros(shape, DType.F32) for name, shape in shapes.items()}
        with pytest.raises(error, match=says):
            nn.attention(ctx, given["q"], given["k"], given["v"], given["mask"], 1.0, given["sinks"])

    def test_causal_with_fewer_keys_than_queries(self, ctx: ml.Context) -> None:
        with pytest.raises(ml.ShapeError, match="CAUSAL"):
            nn.attention(ctx, *tensors(ctx, 5, 3), ml.CAUSAL)

    def test_dtypes(self, ctx: ml.Context) -> None:
        q, k, v = tensors(ctx, 2, 3)
        with pytest.raises(ml.DTypeError, match="key and value must have the same dtype"):
            nn.attention(ctx, q, k.cast(ctx, DType.F16), v)
        with pytest.raises(ml.DTypeError, match="floats"):
            nn.attention(ctx, q.cast(ctx, DType.I32), k, v)
        with pytest.raises(ml.DTypeError, match="additive"):
            nn.attention(ctx, q, k, v, ctx.zeros((2, 3), DType.I32))


@pytest.mark.skipif(not runnable("torch"), reason="torch is not installed")
@pytest.mark.parametrize("at", [1, 7, 23])
def test_a_history_in_two_places_is_attended_to_where_it_lies(at: int) -> None:
    """K and V stay on their backends; what crosses is (tokens, heads, ...), however long the history is."""
    with (
        ml.open_backend("numpy") as far,
        ml.open_backend("torch", device="cpu") as near,
        far.new_context() as there,
        near.new_context() as here,
    ):
        q, k, v = tensors(here, 3, 24)
        old = [there.from_numpy(x.to_numpy()) for x in (q, k.slice(here, 0, 0, at), v.slice(here, 0, 0, at))]
        parts = []
        for ctx, (query, *rest) in (
            (there, old),
            (here, (q, k.slice(here, 0, at, 24), v.slice(here, 0, at, 24))),
        ):
            one = [x.reshape(ctx, 1, *x.shape) for x in (query, *rest)]
            out, lse = nn.partial_attention(ctx, *one, None, 0.3)
            parts.append((here.from_numpy(out.to_numpy()[0]), here.from_numpy(lse.to_numpy()[0])))
        found = nn.merge_attention(here, parts)
        wanted = reference(*host(q, k, v), np.zeros((3, 24)), 0.3)
        np.testing.assert_allclose(found.to_numpy(), wanted, rtol=1e-5, atol=1e-6)
