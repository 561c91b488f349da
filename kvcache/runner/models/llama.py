"""A Llama-family decoder, written once on ml.nn: Llama 2 and 3, Mistral, Qwen2, Qwen3.

One pre-norm layer (Touvron et al., 2023), of which the families switch parts on or off::

    hidden += o(attend(rope(norm(q)), cache(rope(norm(k)), v)))    q, k, v of rms_norm(hidden)
    hidden += down(silu(gate) * up)                                gate, up of rms_norm(hidden)

Queries, keys and values are one product, and so are gate and up: their weights are joined when the
model is loaded. Queries and keys then lie side by side and are normalised and rotated as one tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml
from kvcache.cache import Batch, Cache, ShiftFunction
from kvcache.caches.causal import CausalCache
from kvcache.runner.checkpoints.weights import expected_shapes
from kvcache.runner.config import ModelConfig
from kvcache.runner.models.attention import Attention, load_attention, qk_norm
from kvcache.runner.models.decoder import CausalModel, Layer, Step
from kvcache.runner.models.feedforward import load_mlp
from kvcache.runner.models.loader import Loader, Weights
from kvcache.runner.models.prenorm import PreNormLayer, load_norms
from ml import nn

__all__ = ["Llama", "Weights"]

_ROPE = "rope"


class Llama(CausalModel[ModelConfig]):
    """The weights of a model on a backend's devices, and its forward pass, on any cache.

    ``shift`` is the function by which a cache moves this model's keys to other positions.
    """

    cache_type = object
    shapes = staticmethod(expected_shapes)

    @property
    def shift(self) -> ShiftFunction:
        return nn.rope_shift(self.config.rope)

    def make_cache(self) -> CausalCache:
        return CausalCache(self.shift)

    def _begin(self, ctx: ml.Context, batch: Batch, cache: Cache) -> Step:
        return Step(batch, cache, {_ROPE: nn.Rotation(ctx, batch.positions, self.config.rope)})

    def _layer(self, load: Loader, ctx: ml.Context, i: int) -> Layer:
        config, prefix = self.config, f"model.layers.{i}"
        attention = f"{prefix}.self_attn"
        norm = qk_norm(load, ctx, attention, config) if config.qk_norm else None
        return _Layer(
            eps=config.rms_norm_eps,
            norms=load_norms(load, ctx, prefix),
            attention=load_attention(load, ctx, attention, config, qk_norm=norm),
            mlp=load_mlp(load, ctx, f"{prefix}.mlp"),
        )


@dataclass(frozen=True, slots=True)
class _Layer(PreNormLayer):
    attention: Attention

    def _mixed(self, ctx: ml.Context, normed: ml.Tensor, step: Step) -> ml.Tensor:
        return self.attention(ctx, normed, step.cache, step.rotations[_ROPE])
