"""Self-attention through a cache, with optional parts for different families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import ml
from kvcache_engine.config import ModelConfig
from kvcache_engine.models.step import ROPE, Step
from kvcache_engine.weights import Linear, Loader, Shape

__all__ = ["Attention", "attention_shapes", "load_attention", "merge_heads", "qk_norm"]


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention; queries, keys and values are one product.

    ``qkv``: hidden_size -> (heads + 2 kv_heads) * head_dim, and with ``gated`` another heads * head_dim,
    whose sigmoid multiplies the result (Qwen3-Next). ``qk_norm`` (heads + kv_heads, head_dim): the weights of
    an RMS norm per head before the rotation. ``rotation`` names a rotation of the step.
    """

    qkv: Linear
    output: Linear
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    eps: float = 1e-6
    qk_norm: ml.Tensor | None = None
    gated: bool = False
    rotation: str | None = ROPE

    def __call__(self, ctx: ml.Context, x: ml.Tensor, step: Step) -> ml.Tensor:
        """x (tokens, hidden_size) -> the same."""
        tokens, heads, rotated = x.shape[0], self.heads, self.heads + self.kv_heads
        joined = self.qkv(ctx, x)
        joined = joined.reshape(ctx, tokens, joined.shape[1] // self.head_dim, self.head_dim)
        qk = joined.slice(ctx, 1, 0, rotated)
        if self.qk_norm is not None:
            qk = qk.rms_norm(ctx, None, self.eps).mul(ctx, self.qk_norm)
        if self.rotation is not None:
            qk = step.rotations[self.rotation].apply(ctx, qk)
        query, key = qk.slice(ctx, 1, 0, heads), qk.slice(ctx, 1, heads, rotated)
        values = rotated + self.kv_heads
        value = joined.slice(ctx, 1, rotated, values)
        step.cache.put(ctx, key, value)
        attended: ml.Tensor = step.cache.attend(ctx, query, self.scale)
        if self.gated:
            gate = joined.slice(ctx, 1, values, values + heads)
            attended = attended.mul(ctx, gate.sigmoid(ctx))
        return self.output(ctx, merge_heads(ctx, attended))


def merge_heads(ctx: ml.Context, attended: ml.Tensor) -> ml.Tensor:
    """(tokens, heads, head_dim) -> (tokens, heads * head_dim)."""
    tokens, heads, head_dim = attended.shape
    try:
        return attended.reshape(ctx, tokens, heads * head_dim)
    except ml.ShapeError:  # kernels that work per head return a permuted view
        return attended.contiguous(ctx).reshape(ctx, tokens, heads * head_dim)


def load_attention(
    load: Loader, ctx: ml.Context, prefix: str, config: ModelConfig, offset: float = 0.0, **options: Any
) -> Attention:
    """Load it from the tensors under ``prefix``; ``options`` are fields of Attention, ``offset`` as in
    ``qk_norm``.
    """
    if "qkv" not in options:
        options["qkv"] = load.linear(ctx, *(f"{prefix}.{name}_proj" for name in "qkv"))
    if "qk_norm" not in options and config.qk_norm:
        options["qk_norm"] = qk_norm(load, ctx, prefix, config, offset)
    fields = {
        "output": load.summed(ctx, f"{prefix}.o_proj"),
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "scale": config.head_dim**-0.5,
        "eps": config.rms_norm_eps,
    }
    return Attention(**(fields | options))


def qk_norm(
    load: Loader, ctx: ml.Context, prefix: str, config: ModelConfig, offset: float = 0.0
) -> ml.Tensor:
    """(heads + kv_heads, head_dim): the queries' weight for each head, then the keys'."""
    query, key = (load.take(f"{prefix}.{name}_norm.weight").astype(np.float32) for name in "qk")
    return load.put(ctx, np.stack([query] * config.heads + [key] * config.kv_heads) + np.float32(offset))


def attention_shapes(config: ModelConfig, gates: int = 0) -> dict[str, Shape]:
    """The tensors of ``self_attn``, with its biases, and ``gates`` additional rows in the query
    projection.
    """
    hidden, queries = config.hidden_size, config.heads * config.head_dim
    keys = config.kv_heads * config.head_dim
    shapes: dict[str, Shape] = {}
    for name, rows in {"q": queries + gates, "k": keys, "v": keys}.items():
        shapes[f"self_attn.{name}_proj.weight"] = (rows, hidden)
        if config.attention_bias:
            shapes[f"self_attn.{name}_proj.bias"] = (rows,)
    shapes["self_attn.o_proj.weight"] = (hidden, queries)
    if config.output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes
