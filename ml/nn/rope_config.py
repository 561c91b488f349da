"""Rotary embeddings as the config.json of a model describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ml.errors import NotSupportedError, ShapeError
from ml.nn.rope_spec import RopeSpec
from ml.nn.scaling import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling

__all__ = ["parse_rope"]

_ORIGINAL = "original_max_position_embeddings"


def parse_rope(
    raw: Mapping[str, Any], head_dim: int, kind: str = "full_attention", partial: bool = False
) -> RopeSpec:
    """The RopeSpec from ``rope_scaling``, or from ``rope_parameters``, of the layer type ``kind`` if each
    type has its own.

    ``partial`` allows rotating only part of head_dim; without it, a partial factor raises NotSupportedError.
    So does a scaling other than linear, llama3 and yarn. Raises ShapeError for a factor of 0 or less.
    """
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    named = {name: raw[name] for name in ("rope_theta", "partial_rotary_factor") if name in raw}
    parameters = {**named, **(raw.get("rope_parameters") or {}).get(kind, {}), **rope.get(kind, rope)}
    if kind not in rope and raw.get(_ORIGINAL):  # as in transformers, even if the config says otherwise
        parameters[_ORIGINAL] = raw[_ORIGINAL]
    share = float(parameters.get("partial_rotary_factor") or 1.0)
    if share != 1.0 and not partial:
        raise NotSupportedError(f"partial_rotary_factor={share} is not supported; only 1 is")
    scaling = _scaling(parameters, raw["max_position_embeddings"])
    return RopeSpec(int(head_dim * share), float(parameters["rope_theta"]), scaling=scaling)


def _scaling(parameters: Mapping[str, Any], max_positions: int) -> RopeScaling | None:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    original = int(parameters.get(_ORIGINAL) or max_positions)
    if kind in ("default", None):
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise NotSupportedError(f"rope scaling {kind!r} is not supported; linear, llama3 and yarn are")
    if kind != "yarn" and parameters.get("mscale_all_dim"):
        raise NotSupportedError(
            f"mscale_all_dim with rope scaling {kind!r} is not supported; with yarn it is"
        )
    factor = float(parameters["factor"])
    if not factor > 0:
        raise ShapeError(f"rope scaling {kind!r} with factor={factor}; it must be above 0")
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


def _float(value: Any) -> float | None:
    return None if value is None else float(value)
