"""Rotary embeddings from GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvcache_engine.errors import ModelError
from ml.nn import Llama3Scaling, RopeSpec, YarnScaling

__all__ = ["scaling_from_factors", "yarn_from_gguf"]


def yarn_from_gguf(scaling: Mapping[str, Any], max_positions: int) -> YarnScaling:
    """YaRN from the keys below ``{arch}.rope.scaling.``; llama.cpp multiplies YaRN's own factor by
    attn_factor.
    """
    plain = YarnScaling(float(scaling["factor"]), int(scaling["original_context_length"] or max_positions))
    return YarnScaling(
        plain.factor,
        plain.original_max_position,
        beta_fast=float(scaling["yarn_beta_fast"] or 32.0),
        beta_slow=float(scaling["yarn_beta_slow"] or 1.0),
        attention_factor=float(scaling["attn_factor"] or 1.0) * plain.attention_scale,
    )


def scaling_from_factors(factors: np.ndarray, dim: int, base: float) -> Llama3Scaling:
    """Llama 3's scaling from ``rope_freqs.weight``, in which llama.cpp's converter stores its divisors. The
    divisors alone do not determine the parameters, but all Llama 3 models have the same ones except for the
    factor; the result is checked against the divisors. Raises ModelError for other divisors.
    """
    scaling = Llama3Scaling(float(factors.max()), 1.0, 4.0, 8192)
    plain = RopeSpec(dim, base).inverse_frequencies
    if factors.shape != plain.shape or not np.allclose(
        plain / scaling.scale(plain, base), factors, rtol=1e-3
    ):
        raise ModelError("rope_freqs.weight is not the rope scaling of Llama 3; no other is supported")
    return scaling
