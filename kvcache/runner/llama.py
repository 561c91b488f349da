"""A Llama-family decoder, written once on ml.nn: Llama 2 and 3, Mistral, Qwen2, Qwen3.

One pre-norm layer (Touvron et al., 2023), of which the families switch parts on or off::

    hidden += o(attend(rope(norm(q)), cache(rope(norm(k)), v)))    q, k, v of rms_norm(hidden)
    hidden += down(silu(gate) * up)                                gate, up of rms_norm(hidden)

Queries, keys and values are one product, and so are gate and up: their weights are joined when the
model is loaded. Queries and keys then lie side by side and are normalised and rotated as one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

import ml
from kvcache.cache import Batch, Cache, ShiftFunction
from kvcache.runner.config import ModelConfig
from kvcache.runner.errors import ModelError, RequestError
from ml import nn

__all__ = ["Llama", "Weights"]

Progress = Callable[[int, int], None]


class Weights(Protocol):
    """Host arrays under Hugging Face's names, F32, F16 or BF16 (``ml_dtypes.bfloat16``)."""

    def __getitem__(self, name: str, /) -> np.ndarray: ...
    def __contains__(self, name: object, /) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Linear:
    """``weight`` (in, out): the transposed view of what is stored as (out, in)."""

    weight: ml.Tensor
    bias: ml.Tensor | None

    def __call__(self, ctx: ml.Context, x: ml.Tensor) -> ml.Tensor:
        result = x.matmul(ctx, self.weight)
        return result if self.bias is None else result.add(ctx, self.bias)


@dataclass(frozen=True, slots=True)
class _Layer:
    """``qk_norm`` (heads + kv_heads, head_dim): the queries' weight for each head, then the keys'."""

    attention_norm: ml.Tensor
    qkv: _Linear
    qk_norm: ml.Tensor | None
    output: _Linear
    mlp_norm: ml.Tensor
    gate_up: _Linear
    down: _Linear


class Llama:
    """The weights of a model on a backend's devices, and its forward pass.

    ``dtype`` is what weights and activations are held in (logits are F32). Layer i lies on the device
    of ``ctx.layer(i)``, embeddings and head on that of ``ctx.input()``. ``progress(done, total)``
    counts tensors as they are loaded. Raises ModelError for a tensor missing or of the wrong shape.
    """

    def __init__(
        self,
        backend: ml.Backend,
        config: ModelConfig,
        weights: Weights,
        dtype: ml.DType = ml.DType.F32,
        progress: Progress | None = None,
    ) -> None:
        self.backend = backend
        self.config = config
        self.dtype = dtype
        self.scale = config.head_dim**-0.5
        self.shift: ShiftFunction = nn.rope_shift(config.rope)
        with backend.new_context() as ctx:
            load = _Loader(config, weights, dtype, progress)
            self._embedding = load.matrix(ctx.input(), "model.embed_tokens", config.vocab_size)
            self._layers = [load.layer(ctx.layer(i), i) for i in range(config.layers)]
            self._norm = load.vector(ctx.input(), "model.norm", config.hidden_size)
            head = self._embedding
            if not config.tie_embeddings:
                head = load.matrix(ctx.input(), "lm_head", config.vocab_size)
            self._head = _Linear(head.permute(ctx, 1, 0), None)

    def forward(self, ctx: ml.Context, batch: Batch, cache: Cache) -> ml.Tensor:
        """Logits F32 (len(batch.outputs), vocab_size) of the rows in ``batch.outputs``; None: of all.

        ``batch.inputs`` are token ids, one per position. The caller has called
        ``cache.start_forward(ctx, batch)``: that is where a batch that does not fit is refused.
        """
        hidden = nn.embedding(ctx.input(), self._embedding, self._tokens(batch))
        outputs = batch.outputs
        if outputs is not None and list(outputs) == list(range(len(batch))):
            outputs = None
        here, last = ctx.input(), len(self._layers) - 1
        rotation = nn.Rotation(here, batch.positions, self.config.rope)
        for i, layer in enumerate(self._layers):
            there = ctx.layer(i)
            if len(self.backend.devices) > 1 and there is not here:
                hidden, rotation = hidden.cast(there, self.dtype), rotation.to(there)
            here = there
            cache.set_layer(i)
            hidden = self._layer(here, layer, hidden, rotation, cache, outputs if i == last else None)
        return self._logits(ctx.input(), hidden)

    def _tokens(self, batch: Batch) -> ml.Indices:
        if batch.inputs is None:
            raise RequestError("forward: the batch has no inputs; they are the token ids")
        tokens: ml.Indices = batch.inputs
        count = len(tokens) if isinstance(tokens, (Sequence, np.ndarray)) else tokens.shape[0]
        if count != len(batch):
            raise RequestError(f"forward: {count} inputs for {len(batch)} positions; there is one token each")
        return tokens

    def _layer(
        self,
        ctx: ml.Context,
        layer: _Layer,
        hidden: ml.Tensor,
        rotation: nn.Rotation,
        cache: Cache,
        keep: Sequence[int] | None,
    ) -> ml.Tensor:
        """hidden (tokens, hidden_size) -> the same; only the rows ``keep`` where it is given.

        Nothing reads the other rows of the last layer: their keys and values are stored by then.
        """
        attended = self._attention(ctx, layer, hidden, rotation, cache)
        if keep is not None:
            attended, hidden = attended.rows(ctx, keep), hidden.rows(ctx, keep)
        hidden = hidden.add(ctx, layer.output(ctx, attended))
        inner = self.config.intermediate_size
        both = layer.gate_up(ctx, hidden.rms_norm(ctx, layer.mlp_norm, self.config.rms_norm_eps))
        gated = nn.swiglu(ctx, both.slice(ctx, 1, 0, inner), both.slice(ctx, 1, inner, 2 * inner))
        return hidden.add(ctx, layer.down(ctx, gated))

    def _attention(
        self, ctx: ml.Context, layer: _Layer, hidden: ml.Tensor, rotation: nn.Rotation, cache: Cache
    ) -> ml.Tensor:
        """(tokens, hidden_size) -> (tokens, heads * head_dim), by way of the cache."""
        config = self.config
        tokens, heads, rotated = hidden.shape[0], config.heads, config.heads + config.kv_heads
        qkv = layer.qkv(ctx, hidden.rms_norm(ctx, layer.attention_norm, config.rms_norm_eps))
        qkv = qkv.reshape(ctx, tokens, rotated + config.kv_heads, config.head_dim)
        qk = qkv.slice(ctx, 1, 0, rotated)
        if layer.qk_norm is not None:
            qk = qk.rms_norm(ctx, None, config.rms_norm_eps).mul(ctx, layer.qk_norm)
        qk = rotation.apply(ctx, qk)
        key, value = qk.slice(ctx, 1, heads, rotated), qkv.slice(ctx, 1, rotated, rotated + config.kv_heads)
        cache.put(ctx, key, value)
        attended = cache.attend(ctx, qk.slice(ctx, 1, 0, heads), self.scale)
        try:
            return attended.reshape(ctx, tokens, heads * config.head_dim)
        except ml.ShapeError:  # kernels that work head by head return a permuted view
            return attended.contiguous(ctx).reshape(ctx, tokens, heads * config.head_dim)

    def _logits(self, ctx: ml.Context, hidden: ml.Tensor) -> ml.Tensor:
        if len(self.backend.devices) > 1:
            hidden = hidden.cast(ctx, self.dtype)
        logits = self._head(ctx, hidden.rms_norm(ctx, self._norm, self.config.rms_norm_eps))
        return logits if self.dtype is ml.DType.F32 else logits.cast(ctx, ml.DType.F32)


class _Loader:
    """Takes tensors by name, checks and joins them on the host, and puts them on a device."""

    def __init__(
        self, config: ModelConfig, weights: Weights, dtype: ml.DType, progress: Progress | None
    ) -> None:
        self.config = config
        self.weights = weights
        self.dtype = dtype
        self.progress = progress
        self.done = 0
        per_layer = 9 + 3 * config.attention_bias + config.output_bias + 3 * config.mlp_bias
        per_layer += 2 * config.qk_norm
        self.total = config.layers * per_layer + (2 if config.tie_embeddings else 3)

    def matrix(self, ctx: ml.Context, name: str, rows: int) -> ml.Tensor:
        return self._put(ctx, self._take(f"{name}.weight", (rows, self.config.hidden_size)))

    def vector(self, ctx: ml.Context, name: str, size: int) -> ml.Tensor:
        return self._put(ctx, self._take(f"{name}.weight", (size,)))

    def layer(self, ctx: ml.Context, i: int) -> _Layer:
        config, prefix = self.config, f"model.layers.{i}"
        hidden, inner = config.hidden_size, config.intermediate_size
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = {f"{attention}.q_proj": queries, f"{attention}.k_proj": keys, f"{attention}.v_proj": keys}
        gate_up = {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}
        return _Layer(
            attention_norm=self.vector(ctx, f"{prefix}.input_layernorm", hidden),
            qkv=self._linear(ctx, qkv, hidden, config.attention_bias),
            qk_norm=self._qk_norm(ctx, attention) if config.qk_norm else None,
            output=self._linear(ctx, {f"{attention}.o_proj": hidden}, queries, config.output_bias),
            mlp_norm=self.vector(ctx, f"{prefix}.post_attention_layernorm", hidden),
            gate_up=self._linear(ctx, gate_up, hidden, config.mlp_bias),
            down=self._linear(ctx, {f"{mlp}.down_proj": hidden}, inner, config.mlp_bias),
        )

    def _linear(self, ctx: ml.Context, parts: dict[str, int], size: int, bias: bool) -> _Linear:
        """Maps from ``size`` inputs, joined along their outputs; ``parts``: name -> outputs."""
        weights = [self._take(f"{name}.weight", (rows, size)) for name, rows in parts.items()]
        weight = self._put(ctx, _joined(weights)).permute(ctx, 1, 0)
        if not bias:
            return _Linear(weight, None)
        biases = [self._take(f"{name}.bias", (rows,)) for name, rows in parts.items()]
        return _Linear(weight, self._put(ctx, _joined(biases)))

    def _qk_norm(self, ctx: ml.Context, attention: str) -> ml.Tensor:
        config = self.config
        query, key = (self._take(f"{attention}.{name}_norm.weight", (config.head_dim,)) for name in "qk")
        return self._put(ctx, np.stack([query] * config.heads + [key] * config.kv_heads))

    def _take(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in self.weights:
            raise ModelError(f"the weights hold no tensor {name!r}, which the config asks for")
        array = self.weights[name]
        if array.shape != shape:
            raise ModelError(f"{name} has shape {array.shape}; the config says {shape}")
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total)
        return array

    def _put(self, ctx: ml.Context, array: np.ndarray) -> ml.Tensor:
        return ctx.from_numpy(array, self.dtype)


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
