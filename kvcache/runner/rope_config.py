"""Rotary embeddings as config.json and GGUF metadata describe them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvcache.runner.errors import ModelError
from ml.nn.rope_spec import RopeSpec
from ml.nn.scaling import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling

__all__ = ["parse_rope", "scaling_from_factors", "yarn_from_gguf"]

_ORIGINAL = "original_max_position_embeddings"


def parse_rope(
    raw: Mapping[str, Any], head_dim: int, kind: str = "full_attention", partial: bool = False
) -> RopeSpec:
    """From ``rope_scaling`` or, of layers of type ``kind`` where each has its own, ``rope_parameters``.

    ``partial``: as much of head_dim is rotated as they say. Raises ModelError where that is not all of it, in
    a family that has no such thing.
    """
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    named = {name: raw[name] for name in ("rope_theta", "partial_rotary_factor") if name in raw}
    parameters = {**named, **(raw.get("rope_parameters") or {}).get(kind, {}), **given.get(kind, given)}
    if kind not in given and raw.get(_ORIGINAL):  # as transformers has it, also where they say another
        parameters[_ORIGINAL] = raw[_ORIGINAL]
    share = float(parameters.get("partial_rotary_factor") or 1.0)
    if share != 1.0 and not partial:
        raise ModelError(f"partial_rotary_factor={share} is not supported; only 1 is")
    scaling = _scaling(parameters, raw["max_position_embeddings"])
    return RopeSpec(int(head_dim * share), float(parameters["rope_theta"]), scaling=scaling)


def _scaling(parameters: Mapping[str, Any], max_positions: int) -> RopeScaling | None:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    original = int(parameters.get(_ORIGINAL) or max_positions)
    if kind in ("default", None):
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise ModelError(f"rope scaling {kind!r} is not supported; linear, llama3 and yarn are")
    if kind != "yarn" and parameters.get("mscale_all_dim"):
        raise ModelError(f"mscale_all_dim with rope scaling {kind!r} is not supported; with yarn it is")
    factor = float(parameters["factor"])
    if not factor > 0:
        raise ModelError(f"rope scaling {kind!r} with factor={factor}; it must be above 0")
    if kind == "linear":
        return LinearScaling(factor)
    if kind == "llama3":
        low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
        return Llama3Scaling(factor, low, high, original)
    return _yarn(parameters, factor, original)


def _yarn(parameters: Mapping[str, Any], factor: float, original: int) -> YarnScaling:
    return YarnScaling(
        factor=factor,
        original_max_position=original,
        beta_fast=float(parameters.get("beta_fast") or 32.0),
        beta_slow=float(parameters.get("beta_slow") or 1.0),
        attention_factor=_float(parameters.get("attention_factor")),
        mscale=_float(parameters.get("mscale")),
        mscale_all_dim=_float(parameters.get("mscale_all_dim")),
        truncate=bool(parameters.get("truncate", True)),
    )


def yarn_from_gguf(scaling: Mapping[str, Any], max_positions: int) -> YarnScaling:
    """From the keys below ``{arch}.rope.scaling.``; llama.cpp multiplies its attn_factor to YaRN's own."""
    plain = YarnScaling(float(scaling["factor"]), int(scaling["original_context_length"] or max_positions))
    return YarnScaling(
        plain.factor,
        plain.original_max_position,
        beta_fast=float(scaling["yarn_beta_fast"] or 32.0),
        beta_slow=float(scaling["yarn_beta_slow"] or 1.0),
        attention_factor=float(scaling["attn_factor"] or 1.0) * plain.attention_scale,
    )


def scaling_from_factors(factors: np.ndarray, dim: int, base: float) -> Llama3Scaling:
    """Llama 3's scaling from the ``rope_freqs.weight`` that llama.cpp's converter bakes it into.

    The divisors alone do not name the parameters, but all Llama 3 models share all but the factor;
    they are taken from there and checked against the divisors. Raises ModelError for any others.
    """
    scaling = Llama3Scaling(float(factors.max()), 1.0, 4.0, 8192)
    plain = RopeSpec(dim, base).inverse_frequencies
    if factors.shape != plain.shape or not np.allclose(
        plain / scaling.scale(plain, base), factors, rtol=1e-3
    ):
        raise ModelError("rope_freqs.weight is not the rope scaling of Llama 3; no other is supported")
    return scaling


def _float(value: Any) -> float | None:
    return None if value is None else float(value)
