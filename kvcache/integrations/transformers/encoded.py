"""The encoder outputs of several sequences, read as one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import ml
from kvcache import EncoderCache, InvalidRangeError, OrderError

__all__ = ["read_encoded"]


def read_encoded(
    ctx: ml.Context, cache: EncoderCache, layer: int, sequences: Sequence[int]
) -> tuple[ml.Tensor, ml.Tensor]:
    """K (sequences, kv_heads, length, head_dim) and V of the encoder outputs of several sequences. A view for
    one sequence, else a copy. Raises OrderError if one has none, InvalidRangeError if the outputs differ in
    length.
    """
    outputs = {seq: pair for seq in sequences if (pair := cache.encoder_output(seq, layer)) is not None}
    missing = [seq for seq in sequences if seq not in outputs]
    if missing:
        raise OrderError(f"read_encoded: sequences {missing} have no encoder output in layer {layer}")
    pairs = [outputs[seq] for seq in sequences]
    lengths = {key.shape[0] for key, _ in pairs}
    if len(lengths) != 1:
        raise InvalidRangeError(f"read_encoded: encoder outputs of {sorted(lengths)} positions in one read")
    return _stacked(ctx, [key for key, _ in pairs]), _stacked(ctx, [value for _, value in pairs])


def _stacked(ctx: ml.Context, parts: Sequence[ml.Tensor]) -> ml.Tensor:
    """Parts (length, heads, dim), stacked to (parts, heads, length, dim)."""
    whole = parts[0].reshape(ctx, 1, *parts[0].shape)
    for part in parts[1:]:
        whole = whole.concat(ctx, part.reshape(ctx, 1, *part.shape), 0)
    return whole.permute(ctx, 0, 2, 1, 3)
