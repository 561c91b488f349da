"""What ``put`` is given for a layer: checked, and as it is stored."""

from __future__ import annotations

import math
from collections.abc import Mapping

import ml
from kvcache.attention.batch import check_tensors
from kvcache.cache import InvalidRangeError
from kvcache.storage.layer_shape import ExtraSpec, LayerShape, latent_dim

__all__ = ["check_put", "flattened"]


def check_put(
    tokens: int,
    key: ml.Tensor,
    value: ml.Tensor | None,
    v_dim: int | None,
    extra: Mapping[str, ml.Tensor] | None,
) -> LayerShape:
    """What a layer stores of such tensors; InvalidRangeError where they do not fit a batch of ``tokens``."""
    check_tensors("put", key=key)
    if value is not None:
        check_tensors("put", value=value)
    given = {"key": key.shape} if value is None else {"key": key.shape, "value": value.shape}
    heads = key.shape[1] if len(key.shape) > 1 else 0
    if any(len(shape) != 3 or shape[:2] != (tokens, heads) for shape in given.values()):
        told = " and ".join(f"{name} {shape}" for name, shape in given.items())
        raise InvalidRangeError(
            f"put: {told} for a batch of {tokens}; they are (tokens, kv_heads, head_dim) and "
            "(tokens, kv_heads, v_dim)"
        )
    own = tuple(_extra(tokens, name, extra[name]) for name in sorted(extra, key=str)) if extra else ()
    dim = key.shape[2]
    if value is None:
        return LayerShape((heads, dim), (heads, latent_dim(dim, v_dim)), True, own)
    if v_dim is not None:
        raise InvalidRangeError(f"put: v_dim={v_dim} beside values; it is for keys that hold the values")
    return LayerShape((heads, dim), (heads, value.shape[2]), False, own)


def flattened(
    ctx: ml.Context,
    shape: LayerShape,
    key: ml.Tensor,
    value: ml.Tensor | None,
    extra: Mapping[str, ml.Tensor] | None,
) -> tuple[ml.Tensor, ...]:
    """What was checked as it is stored, (tokens, heads, dim) each, in the order of ``stored``."""
    found = (key,) if value is None else (key, value)
    if not extra:
        return found
    return *found, *(
        extra[one.name].contiguous(ctx).reshape(ctx, key.shape[0], 1, one.size) for one in shape.extra
    )


def _extra(tokens: int, name: object, tensor: ml.Tensor) -> ExtraSpec:
    if not (isinstance(name, str) and name):
        raise InvalidRangeError(
            f"put: extra {name!r:.40}; its name must be a string of at least one character"
        )
    check_tensors("put", **{f"extra {name}": tensor})
    shape = tensor.shape
    if shape[:1] != (tokens,) or not math.prod(shape[1:]):
        raise InvalidRangeError(
            f"put: extra {name} {shape} for a batch of {tokens}; it must be (tokens, ...), with at least one "
            "number per token"
        )
    return ExtraSpec(name, tuple(shape[1:]), tensor.dtype)
