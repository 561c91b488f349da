"""Rotary embeddings against float64 rotations of complex numbers, and against transformers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

import ml
from ml import DType, nn
from ml.nn import FactorScaling, LinearScaling, Llama3Scaling, RopeSpec, YarnScaling

from ..rigs.each_backend import each_context

TOLERANCE = {DType.F32: 3e-6, DType.F16: 3e-3, DType.BF16: 2.5e-2}
POSITIONS = [0, 1, 2, 9, 3, 100]

ctx = each_context("numpy", "torch", "mlx")


LLAMA3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64)
SPECS = {
    "default": RopeSpec(16),
    "interleaved": RopeSpec(16, interleaved=True),
    "partial": RopeSpec(8),
    "partial interleaved": RopeSpec(6, interleaved=True),
    "linear": RopeSpec(16, scaling=LinearScaling(4.0)),
    "factors": RopeSpec(16, scaling=FactorScaling((1.0, 1.5, 1.25, 8.0, 0.5, 2.0, 3.0, 4.0), 1.2)),
    "llama3": RopeSpec(16, base=5e5, scaling=LLAMA3),
    "yarn": RopeSpec(16, scaling=YarnScaling(4.0, 32)),
    "partial yarn": RopeSpec(8, interleaved=True, scaling=YarnScaling(4.0, 32)),
}


def reference(x: np.ndarray, positions: Any, spec: RopeSpec) -> np.ndarray:
    """Each pair as a complex number, times exp(i * position * frequency)."""
    x = np.array(x, np.float64)
    half = spec.dim // 2
    first = slice(0, spec.dim, 2) if spec.interleaved else slice(0, half)
    second = slice(1, spec.dim, 2) if spec.interleaved else slice(half, spec.dim)
    angles = np.asarray(positions, np.float64)[:, None, None] * spec.inverse_frequencies
    turned = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles) * spec.attention_factor
    x[..., first], x[..., second] = turned.real, turned.imag
    return x


def random(ctx: ml.Context, tokens: int = 6, dtype: DType = DType.F32) -> ml.Tensor:
    return ctx.from_numpy(np.random.default_rng(0).standard_normal((tokens, 3, 16)), dtype)


def close(got: ml.Tensor, expected: np.ndarray, factor: float = 1.0) -> None:
    tolerance = TOLERANCE[got.dtype] * factor
    np.testing.assert_allclose(got.to_numpy().astype(np.float64), expected, rtol=tolerance, atol=tolerance)


class TestRotation:
    @pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
    @pytest.mark.parametrize("where", ["host", "device"])
    def test_values(self, ctx: ml.Context, spec: RopeSpec, where: str) -> None:
        x = random(ctx)
        positions: Any = POSITIONS if where == "host" else ctx.from_numpy(POSITIONS, DType.I32)
        expected = reference(x.to_numpy(), POSITIONS, spec)
        close(nn.rope(ctx, x, positions, spec), expected, 4)  # float32 angles of 100 radians
        cos, sin = nn.rope_tables(ctx, positions, spec)
        assert cos.shape == sin.shape == (6, 1, spec.dim)
        for _ in range(2):  # tables serve any number of layers
            close(nn.apply_rope(ctx, x, cos, sin, spec), expected, 4)

    @pytest.mark.parametrize("where", ["host", "device"])
    def test_far_positions(self, ctx: ml.Context, where: str) -> None:
        """Each is odd: no narrower dtype holds them."""
        x, far = random(ctx, 3), [4097, 65537, 131071]
        positions: Any = far if where == "host" else ctx.from_numpy(far, DType.I32)
        got = nn.rope(ctx, x, positions, SPECS["default"]).to_numpy()
        expected = reference(x.to_numpy(), far, SPECS["default"])
        np.testing.assert_allclose(got, expected, rtol=0, atol=0.05)  # float32 angles of 131,071 radians

    @pytest.mark.parametrize("dtype", list(TOLERANCE))
    def test_rounds_once_to_the_dtype_of_x(self, ctx: ml.Context, dtype: DType) -> None:
        x = random(ctx, dtype=dtype)
        got = nn.rope(ctx, x, POSITIONS, SPECS["default"])
        assert got.dtype is dtype
        exact = nn.rope(ctx, x.cast(ctx, DType.F32), POSITIONS, SPECS["default"])
        np.testing.assert_array_equal(got.to_numpy(), exact.cast(ctx, dtype).to_numpy())

    def test_of_a_view(self, ctx: ml.Context) -> None:
        x = random(ctx).slice(ctx, 1, 1, 3)
        for name in ("default", "interleaved", "partial"):
            close(nn.rope(ctx, x, POSITIONS, SPECS[name]), reference(x.to_numpy(), POSITIONS, SPECS[name]), 4)

    def test_no_tokens(self, ctx: ml.Context) -> None:
        assert nn.rope(ctx, random(ctx, 0), [], SPECS["default"]).shape == (0, 3, 16)

    def test_products_depend_on_distance_alone(self, ctx: ml.Context) -> None:
        x = ctx.from_numpy(np.random.default_rng(1).standard_normal((1, 2, 16)), DType.F32)

        def product(spec: RopeSpec, p: int, q: int) -> float:
            a, b = (nn.rope(ctx, x, [at], spec).to_numpy()[0] for at in (p, q))
            return float(a[0] @ b[1])

        for spec in SPECS.values():
            assert product(spec, 3, 10) == pytest.approx(product(spec, 30, 37), abs=2e-5)

    def test_refusals(self, ctx: ml.Context) -> None:
        x, spec = random(ctx), SPECS["default"]
        with pytest.raises(ml.ShapeError, match="for 5 positions"):
            nn.rope(ctx, x, POSITIONS[:5], spec)
        with pytest.raises(ml.ShapeError, match="head_dim >= 32"):
            nn.rope(ctx, x, POSITIONS, RopeSpec(32))
        with pytest.raises(ml.DTypeError, match="F32, F16 or BF16"):
            nn.rope(ctx, x.cast(ctx, DType.I32), POSITIONS, spec)
        with pytest.raises(ml.DTypeError, match="I32 with one axis"):
            nn.rope(ctx, x, ctx.from_numpy(POSITIONS, DType.I64), spec)
        with pytest.raises(ml.ShapeError, match="integers"):
            nn.rope(ctx, x, np.zeros(6), spec)
        with pytest.raises(ml.ShapeError, match="even"):
            RopeSpec(7)
        with pytest.raises(ml.ShapeError, match="base"):
            RopeSpec(8, base=0.0)


class TestSeveralAxes:
    SECTIONS = (0, 1, 1, 2, 2, 0, 1, 2)
    PLACES = np.array([POSITIONS, [3, 0, 7, 1, 1, 40], [0, 5, 2, 8, 50, 6]])

    @pytest.mark.parametrize("name", ["default", "interleaved", "yarn"])
    @pytest.mark.parametrize("where", ["host", "device"])
    def test_each_pair_turns_by_its_own_axis(self, ctx: ml.Context, name: str, where: str) -> None:
        spec, x = SPECS[name], random(ctx)
        places: Any = self.PLACES if where == "host" else ctx.from_numpy(self.PLACES, DType.I32)
        got = nn.apply_rope(ctx, x, *nn.multi_axis_tables(ctx, places, self.SECTIONS, spec), spec)
        turned = [reference(x.to_numpy(), row, spec) for row in self.PLACES]
        axes = np.repeat(self.SECTIONS, 2) if spec.interleaved else np.tile(self.SECTIONS, 2)
        close(got, np.stack([turned[axis][..., i] for i, axis in enumerate(axes)], 2), 4)

    def test_equal_axes_are_one(self, ctx: ml.Context) -> None:
        spec = SPECS["yarn"]
        tables = nn.multi_axis_tables(ctx, np.array([POSITIONS] * 3), self.SECTIONS, spec)
        for got, plain in zip(tables, nn.rope_tables(ctx, POSITIONS, spec), strict=True):
            assert got.shape == plain.shape
            close(got, plain.to_numpy(), 4)

    def test_refusals(self, ctx: ml.Context) -> None:
        spec = SPECS["default"]
        for places, axes in (
            (self.PLACES, [0] * 7),
            (self.PLACES, [3] + [0] * 7),
            (self.PLACES, [-1] + [0] * 7),
            (self.PLACES[0], [0] * 8),
        ):
            with pytest.raises(ml.ShapeError, match="one of the kinds for each of 8 pairs"):
                nn.multi_axis_tables(ctx, places, axes, spec)
        with pytest.raises(ml.DTypeError, match="must be integers"):
            nn.multi_axis_tables(ctx, self.PLACES.astype(float), [0] * 8, spec)
        with pytest.raises(ml.DTypeError, match="must be I32"):
            nn.multi_axis_tables(ctx, ctx.from_numpy(self.PLACES, DType.I64), [0] * 8, spec)


class TestShift:
    @pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
    def test_equals_rotation_at_the_new_position(self, ctx: ml.Context, spec: RopeSpec) -> None:
        """Also with YaRN, whose attention factor is applied once, not again by the shift."""
        x = random(ctx)
        offsets = [0, -1, 5, -9, 0, -50]
        moved = [p + d for p, d in zip(POSITIONS, offsets, strict=True)]
        stored = nn.rope(ctx, x, POSITIONS, spec)
        got = nn.rope_shift(spec)(ctx, 0, stored, ctx.from_numpy(offsets, DType.I32))
        close(got, reference(x.to_numpy(), moved, spec), 8)

    @pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
    def test_dimensions_before_its_first_stay(self, ctx: ml.Context, spec: RopeSpec) -> None:
        x, before = random(ctx), ctx.full((6, 3, 5), 2.0, DType.F32)
        offsets = ctx.from_numpy([0, -1, 5, -9, 0, -50], DType.I32)
        got = nn.rope_shift(spec, begin=5)(ctx, 0, before.concat(ctx, x, 2), offsets).to_numpy()
        np.testing.assert_array_equal(got[..., :5], 2.0)
        np.testing.assert_array_equal(got[..., 5:], nn.rope_shift(spec)(ctx, 0, x, offsets).to_numpy())

    def test_offset_zero_changes_no_bit(self, ctx: ml.Context) -> None:
        for dtype in TOLERANCE:
            x = random(ctx, dtype=dtype)
            for spec in SPECS.values():
                got = nn.rope_shift(spec)(ctx, 3, x, ctx.zeros((6,), DType.I32))
                np.testing.assert_array_equal(got.to_numpy(), x.to_numpy())


class TestFusedKernel:
    def test_is_used_or_declines(self) -> None:
        from backends.numpy.backend import NumpyBackend

        asked: list[Any] = []

        class Fused(NumpyBackend):
            def rope(self, ctx: Any, x: Any, positions: Any, spec: RopeSpec) -> Any:
                asked.append((positions.dtype, positions.to_numpy().tolist()))
                return None if spec.interleaved else x

        with Fused() as backend, backend.new_context() as ctx:
            x = random(ctx)
            assert nn.rope(ctx, x, POSITIONS, SPECS["default"]) is x
            rotation = nn.Rotation(ctx, POSITIONS, SPECS["interleaved"])
            for _ in range(2):
                close(rotation.apply(ctx, x), reference(x.to_numpy(), POSITIONS, SPECS["interleaved"]), 4)
            with pytest.raises(ml.ShapeError, match="rope"):
                nn.rope(ctx, x, [0], SPECS["default"])
        assert asked == [(DType.I32, POSITIONS)] * 2  # once declined, it is not asked again in that pass

    def test_moves_between_devices(self, ctx: ml.Context) -> None:
        x = random(ctx)
        for positions in (POSITIONS, ctx.from_numpy(POSITIONS, DType.I32)):
            rotation = nn.Rotation(ctx, positions, SPECS["yarn"])
            expected = rotation.apply(ctx, x).to_numpy()
            np.testing.assert_array_equal(rotation.to(ctx).apply(ctx, x).to_numpy(), expected)


class TestSpec:
    def test_is_a_value(self) -> None:
        assert RopeSpec(8) == RopeSpec(8)
        assert hash(SPECS["yarn"]) == hash(dataclasses.replace(SPECS["yarn"]))
        assert SPECS["yarn"].inverse_frequencies is SPECS["yarn"].inverse_frequencies

    def test_one_factor_for_each_pair(self) -> None:
        with pytest.raises(ml.ShapeError, match="3 factors for 4 pairs of dimensions"):
            _ = RopeSpec(8, scaling=FactorScaling((1.0, 2.0, 3.0))).inverse_frequencies
        for factor in (0.0, -1.0, float("nan")):
            with pytest.raises(ml.ShapeError, match="all must be above 0"):
                FactorScaling((1.0, factor))

    def test_frequencies_are_read_only(self) -> None:
        with pytest.raises(ValueError, match="read-only"):
            SPECS["yarn"].inverse_frequencies[0] = 1
        with pytest.raises(ValueError, match="read-only"):
            SPECS["yarn"].signed_frequencies[0] = 1


FACTORS = tuple(1.0 + 0.25 * i for i in range(32))
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "rope_theta": 10000.0}
TRANSFORMERS = {
    "default": ({"rope_type": "default", "rope_theta": 10000.0}, RopeSpec(64)),
    "theta": ({"rope_type": "default", "rope_theta": 1e6}, RopeSpec(64, base=1e6)),
    "linear": (
        {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0},
        RopeSpec(64, scaling=LinearScaling(2.5)),
    ),
    "longrope within the short context": (
        {
            "rope_type": "longrope", "short_factor": list(FACTORS), "long_factor": [64.0] * 32,
            "original_max_position_embeddings": 2048, "factor": 4.0, "rope_theta": 10000.0,
        },
        RopeSpec(64, scaling=FactorScaling(FACTORS, math.sqrt(1 + math.log(4.0) / math.log(2048)))),
    ),
    "llama3": (
        {
            "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_theta": 5e5,
        },
        RopeSpec(64, 5e5, scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192)),
    ),
    "yarn": (YARN, RopeSpec(64, scaling=YarnScaling(4.0, 2048))),
    "yarn with betas": (
        YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
        RopeSpec(64, scaling=YarnScaling(4.0, 2048, beta_fast=16.0, beta_slow=2.0)),
    ),
    "yarn with attention_factor": (
        YARN | {"attention_factor": 1.5},
        RopeSpec(64, scaling=YarnScaling(4.0, 2048, attention_factor=1.5)),
    ),
    "yarn with mscale": (
        YARN | {"mscale": 0.707, "mscale_all_dim": 1.2},
        RopeSpec(64, scaling=YarnScaling(4.0, 2048, mscale=0.707, mscale_all_dim=1.2)),
    ),
    "yarn untruncated": (
        YARN | {"truncate": False, "rope_theta": 150000.0},
        RopeSpec(64, 150000.0, scaling=YarnScaling(4.0, 2048, truncate=False)),
    ),
}  # fmt: skip


class TestAgainstTransformers:
    @pytest.mark.parametrize(("parameters", "spec"), TRANSFORMERS.values(), ids=TRANSFORMERS)
    def test_frequencies(self, parameters: dict[str, Any], spec: RopeSpec) -> None:
        transformers = pytest.importorskip("transformers")
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        sizes = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 8192}
        config = transformers.LlamaConfig(**sizes, rope_parameters=parameters)
        theirs = LlamaRotaryEmbedding(config)  # by way of ROPE_INIT_FUNCTIONS
        expected, factor = theirs.inv_freq, theirs.attention_scaling
        np.testing.assert_allclose(spec.inverse_frequencies, expected.numpy(), rtol=1e-6, atol=0)
        assert spec.attention_factor == pytest.approx(factor, rel=1e-12)

    def test_interleaved(self, ctx: ml.Context) -> None:
        """Cohere pairs neighbours."""
        pytest.importorskip("transformers")
        import torch
        from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb

        spec = RopeSpec(64, interleaved=True)
        x = np.random.default_rng(0).standard_normal((5, 2, 64)).astype(np.float32)
        angles = np.arange(5)[:, None] * np.repeat(spec.inverse_frequencies, 2)
        cos, sin = (torch.from_numpy(f(angles).astype(np.float32))[None] for f in (np.cos, np.sin))
        heads_first = torch.from_numpy(x).permute(1, 0, 2)[None]
        expected, _ = apply_rotary_pos_emb(heads_first, heads_first, cos, sin)
        got = nn.rope(ctx, ctx.from_numpy(x), range(5), spec).to_numpy()
        np.testing.assert_allclose(got, expected[0].permute(1, 0, 2).numpy(), rtol=0, atol=3e-6)

    def test_several_axes(self, ctx: ml.Context) -> None:
        """Qwen2-VL turns runs of pairs by time, height and width."""
        transformers = pytest.importorskip("transformers")
        import torch
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding

        sections = [8, 12, 12]
        rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
        config = transformers.Qwen2VLTextConfig(hidden_size=256, num_attention_heads=4, rope_parameters=rope)
        places = np.random.default_rng(0).integers(0, 60, (3, 5))
        x = np.random.default_rng(1).standard_normal((5, 2, 64)).astype(np.float32)
        cos, sin = Qwen2VLRotaryEmbedding(config)(torch.from_numpy(x), torch.from_numpy(places)[:, None])
        half = np.concatenate([-x[..., 32:], x[..., :32]], 2)
        expected = x * cos[0].numpy()[:, None] + half * sin[0].numpy()[:, None]
        spec, axes = RopeSpec(64, 1e6), np.repeat([0, 1, 2], sections)
        got = nn.apply_rope(ctx, ctx.from_numpy(x), *nn.multi_axis_tables(ctx, places, axes, spec), spec)
        np.testing.assert_allclose(got.to_numpy(), expected, rtol=0, atol=5e-5)
