"""What a cache is given for a layer: checked, and stored in the cells of the pass."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import ml
from kvcache.attention.batch import check_tensors
from kvcache.attention.forward_pass import ForwardPass
from kvcache.cache import InvalidRangeError, check_context
from kvcache.storage.cell_storage import CellStorage
from kvcache.storage.layer_shape import ExtraSpec, LayerShape, latent_dim

Extras = Mapping[str, ml.Tensor]


def put_layer(
    ctx: ml.Context,
    forward: ForwardPass,
    storage: CellStorage,
    layer: int,
    key: ml.Tensor,
    value: ml.Tensor | None,
    v_dim: int | None,
    extra: Extras | None,
) -> None:
    """What ``CausalCache.put`` does where the backend has no store of its own for it."""
    buffers = fresh = storage.buffers.get(layer)
    check_tensors("put", storage.backend, key=key, **({} if value is None else {"value": value}))
    check_context("put", ctx, storage.backend)
    if not (key.dtype.is_float and (value is None or value.dtype.is_float)):
        told = key.dtype.name if value is None else f"{key.dtype.name} and {value.dtype.name}"
        raise ml.DTypeError(f"put: keys and values in {told}; they must be of float dtypes")
    fits = False
    if buffers is not None and value is not None and v_dim is None and not extra:
        fits = buffers.fits(forward.tokens, key.shape, value.shape)
    if buffers is None or not fits:
        shape = _checked(forward.tokens, key, value, v_dim, extra)
        buffers = buffers or storage.allocate(ctx, layer, shape, key.dtype)
        buffers.check(layer, shape, forward.tokens)
    if not forward.reserve:
        new = buffers.apart(ctx, (key,) if value is None else (key, value))
        if extra:
            new += _flat(ctx, buffers.shape, extra)
        forward.write(ctx, buffers, new)
        forward.note_put(buffers)
    elif fresh is None:
        buffers.touch(ctx.layer(layer))
    storage.buffers[layer] = buffers  # last: a failed write fixes no shapes


def put_stored_layer(
    ctx: ml.Context,
    forward: ForwardPass,
    storage: CellStorage,
    layer: int,
    parts: Sequence[ml.Tensor],
    activations: ml.DType,
    v_dim: int | None,
) -> None:
    check_context("put_stored", ctx, storage.backend)
    told = [(part.shape, part.dtype) for part in parts]
    if any(shape[:1] != (forward.tokens,) for shape, _ in told):
        raise InvalidRangeError(
            f"put_stored: parts {[shape for shape, _ in told]}; each must be ({forward.tokens}, kv_heads, "
            "width)"
        )
    shape = LayerShape.of_parts(storage.dtype, activations, told, v_dim)
    buffers = storage.buffers.get(layer) or storage.allocate(ctx, layer, shape, activations)
    buffers.check(layer, shape, forward.tokens)
    buffers.write_stored(ctx, forward.targets(ctx), tuple(parts))
    forward.note_put(buffers)
    storage.buffers[layer] = buffers


def _checked(
    tokens: int, key: ml.Tensor, value: ml.Tensor | None, v_dim: int | None, extra: Extras | None
) -> LayerShape:
    """What a layer stores of such tensors; InvalidRangeError where they do not fit a batch of ``tokens``."""
    given = {"key": key.shape} if value is None else {"key": key.shape, "value": value.shape}
    heads = key.shape[1] if len(key.shape) > 1 else 0
    if any(len(shape) != 3 or shape[:2] != (tokens, heads) for shape in given.values()):
        told = " and ".join(f"{name} {shape}" for name, shape in given.items())
        raise InvalidRangeError(
            f"put: {told} for a batch of {tokens}; they must be (tokens, kv_heads, head_dim) and "
            "(tokens, kv_heads, v_dim)"
        )
    own = tuple(_extra(tokens, name, extra[name]) for name in sorted(extra, key=str)) if extra else ()
    dim = key.shape[2]
    if value is None:
        return LayerShape((heads, dim), (heads, latent_dim(dim, v_dim)), True, own)
    if v_dim is not None:
        raise InvalidRangeError(
            f"put: v_dim={v_dim} beside values; it must be None, or the values must be left out"
        )
    return LayerShape((heads, dim), (heads, value.shape[2]), False, own)


def _flat(ctx: ml.Context, shape: LayerShape, extra: Extras) -> list[ml.Tensor]:
    """Extras as they are stored, (tokens, 1, numbers) each."""
    found = [extra[one.name].contiguous(ctx) for one in shape.extra]
    return [x.reshape(ctx, x.shape[0], 1, one.size) for x, one in zip(found, shape.extra, strict=True)]


def _extra(tokens: int, name: object, tensor: ml.Tensor) -> ExtraSpec:
    if not (isinstance(name, str) and name):
        raise InvalidRangeError(
            f"put: extra {name!r:.40}; its name must be a string of at least one character"
        )
    check_tensors("put", None, **{f"extra {name}": tensor})
    shape = tensor.shape
    if shape[:1] != (tokens,) or not math.prod(shape[1:]):
        raise InvalidRangeError(
            f"put: extra {name} {shape} for a batch of {tokens}; it must be (tokens, ...), with at least one "
            "number per token"
        )
    return ExtraSpec(name, tuple(shape[1:]), tensor.dtype)
