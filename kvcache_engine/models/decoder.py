"""The common part of decoders: embedding, a sequence of layers, norm and head.

A layer has two parts, so that the last layer need not compute unused rows::

    mix reads other tokens, through the cache: attention, a recurrence
    feed processes each token separately: an MLP, a mixture of experts
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

import ml
from kvcache import CausalCache
from kvcache.cache import Batch, Cache
from kvcache_engine.config import ModelConfig
from kvcache_engine.errors import RequestError
from kvcache_engine.models.attention import attention_shapes, load_attention
from kvcache_engine.models.feedforward import load_mlp, mlp_shapes
from kvcache_engine.models.step import (
    MLP,
    NORMS,
    ROPE,
    Layer,
    Mixer,
    PreNormLayer,
    Step,
    load_norms,
    norm_shapes,
)
from kvcache_engine.parallel import Share
from kvcache_engine.weights import Linear, Loader, Progress, Shape, Shapes, Weights
from ml import nn

__all__ = [
    "CausalModel",
    "Follower",
    "Names",
    "causal_cache",
    "token_ids",
]

C = TypeVar("C", bound=ModelConfig)


class Names(NamedTuple):
    """The names of the tensors outside the layers, and of the list of layers."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"


class Follower(Protocol):
    """Receives the hidden states of the last layer: multi-token prediction."""

    def follow(self, ctx: ml.Context, batch: Batch, step: Step, hidden: ml.Tensor) -> None:
        """Process the normed hidden states (tokens, hidden_size) of a pass."""


def causal_cache(config: ModelConfig, dtype: ml.DType | None = None) -> CausalCache:
    """A CausalCache; it does not depend on ``dtype``."""
    return CausalCache(nn.rope_shift(config.rope))


class CausalModel(Generic[C]):
    """The forward pass; families override their layers, which are those of Llama by default.

    ``dtype`` is the dtype of weights and activations (logits are F32). Layer i is on the device of
    ``ctx.layer(i)``, embeddings and head are on that of ``ctx.input()``. Tensors have Llama's names:
    embedding, layers, an RMS norm and a head.

    ``progress(done, total)`` counts tensors as they are loaded. ``share``: this is one rank's part of a
    model, whose config and weights are those of the part (kvcache_engine.parallel).

    Raises ModelError for a tensor that is missing or has the wrong shape.
    """

    cache_type: type = object
    """The type that ``make_cache`` returns, if the layers require it."""
    cache_of: Callable[..., Cache] = staticmethod(causal_cache)
    """Makes an unbound cache from a config and the dtype of the model's activations."""
    names = Names()
    norm_names = NORMS
    after_names: tuple[str, str] | None = None
    """The names of the norms after a layer's parts."""
    norm_offset = 0.0
    """1 if norm weights are stored around zero."""
    share: Share | None = None
    mtp: Follower | None = None
    """Multi-token prediction, if it was loaded."""

    def __init__(
        self,
        backend: ml.Backend,
        config: C,
        weights: Weights,
        dtype: ml.DType = ml.DType.F32,
        progress: Progress | None = None,
        share: Share | None = None,
    ) -> None:
        self.backend = backend
        self.share = share
        self.config = config
        self.dtype = dtype
        self.origin: Path | None = getattr(weights, "origin", None)
        load = Loader(weights, self.shapes(config), dtype, progress, share.group if share else None)
        with backend.new_context() as ctx:
            here = ctx.input()
            rows = load.take(f"{self.names.embedding}.weight")
            tied = load.transposed(here, rows) if config.tie_embeddings else None
            self._embedding = load.put(here, rows) if tied is None else tied.permute(here, 1, 0)
            self._layers = [self._layer(load, ctx.layer(i), i) for i in range(config.layers)]
            self._norm = load.norm(here, self.names.norm, self.norm_offset)
            self._head = Linear(self._load_head(load, here, tied))
            self._load_more(load, here)

    def make_cache(self) -> Cache:
        """A cache for this model's layers, not yet bound by ``init``."""
        return self.cache_of(self.config, self.dtype)

    @classmethod
    def shapes(cls, config: Any) -> dict[str, Shape]:
        """The name and shape of every tensor of a model of this config."""
        names, size = cls.names, (config.vocab_size, config.hidden_size)
        shapes: dict[str, Shape] = {f"{names.embedding}.weight": size}
        for i in range(config.layers):
            shapes |= cls.numbered(cls.layer_shapes(config, i), i)
        shapes[f"{names.norm}.weight"] = size[1:]
        return shapes if config.tie_embeddings else {**shapes, f"{names.head}.weight": size}

    @classmethod
    def numbered(cls, shapes: Shapes, i: int) -> dict[str, Shape]:
        """The shapes of layer i by full name."""
        return {f"{cls.names.layers}.{i}.{name}": shape for name, shape in shapes.items()}

    @classmethod
    def layer_shapes(cls, config: Any, i: int) -> dict[str, Shape]:
        norms = norm_shapes(config.hidden_size, cls.norm_names + (cls.after_names or ()))
        return norms | cls.mixer_shapes(config, i) | cls.mlp_shapes(config, i)

    @classmethod
    def mixer_shapes(cls, config: Any, i: int) -> dict[str, Shape]:
        """The tensors that ``mixer`` reads."""
        return attention_shapes(config)

    @classmethod
    def mlp_shapes(cls, config: Any, i: int) -> dict[str, Shape]:
        """The tensors that ``mlp`` reads."""
        return mlp_shapes("mlp", config.hidden_size, config.intermediate_size, config.mlp_bias)

    def mixer(self, load: Loader, ctx: ml.Context, prefix: str, i: int) -> Mixer:
        """The part of layer i, from the tensors under ``prefix``."""
        return load_attention(load, ctx, f"{prefix}.self_attn", self.config)

    def mlp(self, load: Loader, ctx: ml.Context, prefix: str, i: int) -> MLP:
        """The part of layer i, from the tensors under ``prefix``."""
        return load_mlp(load, ctx, f"{prefix}.mlp")

    def begin_pass(self, ctx: ml.Context, batch: Batch, cache: Cache) -> Step:
        return Step(batch, cache, {ROPE: nn.Rotation(ctx, batch.positions, self.config.rope)})

    def _layer(self, load: Loader, ctx: ml.Context, i: int) -> Layer:
        prefix, offset, after = f"{self.names.layers}.{i}", self.norm_offset, self.after_names
        return PreNormLayer(
            eps=self.config.rms_norm_eps,
            norms=load_norms(load, ctx, prefix, offset, self.norm_names),
            mixer=self.mixer(load, ctx, prefix, i),
            mlp=self.mlp(load, ctx, prefix, i),
            cache_kind=self.config.cache_kind(i),
            after=None if after is None else load_norms(load, ctx, prefix, offset, after),
        )

    def _load_more(self, load: Loader, ctx: ml.Context) -> None:
        """Load what a family has in addition to its layers."""

    def _load_head(self, load: Loader, ctx: ml.Context, tied: ml.Tensor | None) -> ml.Tensor:
        """(hidden_size, vocab_size), or the columns of this rank; ``tied``: the transposed embedding, if that
        is the head.
        """
        own = self.share.vocab if self.share else range(self.config.vocab_size)
        if tied is not None:
            return tied.slice(ctx, 1, own.start, own.stop)
        return load.transposed(ctx, load.take(f"{self.names.head}.weight")[own.start : own.stop])

    def forward(self, ctx: ml.Context, batch: Batch, cache: Cache) -> ml.Tensor:
        """Logits F32 (len(batch.outputs), vocab_size) for the rows in ``batch.outputs`` (None: all rows).

        ``batch.inputs`` are token ids, one per position. The caller has called ``cache.start_forward(ctx,
        batch)``, which refuses a batch that does not fit.
        """
        if self.share is None:
            return self._forward(ctx, batch, cache)
        self.share.check_step(ctx, batch)
        try:
            return self._forward(ctx, batch, cache)
        except BaseException as error:  # the other ranks are in the middle of the pass
            self.share.group.abandon("forward", error)
            raise

    def _forward(self, ctx: ml.Context, batch: Batch, cache: Cache) -> ml.Tensor:
        outputs = batch.outputs
        if outputs is not None and list(outputs) == list(range(len(batch))):
            outputs = None
        if self.mtp is None:
            hidden, _ = self._run(ctx, batch, cache, outputs)
            return self._read_out(ctx, hidden)
        hidden, step = self._run(ctx, batch, cache, None)
        here = ctx.input()
        self.mtp.follow(here, batch, step, hidden.rms_norm(here, self._norm, self.config.rms_norm_eps))
        return self._read_out(ctx, hidden if outputs is None else hidden.rows(here, outputs))

    def _run(self, ctx: ml.Context, batch: Batch, cache: Cache, outputs: Any) -> tuple[ml.Tensor, Step]:
        """The output of the last layer for the rows in ``outputs``, on the device of ``ctx.input()``."""
        if not isinstance(cache, self.cache_type):
            raise RequestError(
                f"forward: {type(self).__name__} runs on a {self.cache_type.__name__}, not a "
                f"{type(cache).__name__}; its make_cache() makes one"
            )
        here, last = ctx.input(), len(self._layers) - 1
        hidden = self.embed(here, batch)
        step = self.begin_pass(here, batch, cache)
        for i, layer in enumerate(self._layers):
            there = ctx.layer(i)
            if len(self.backend.devices) > 1 and there is not here:
                hidden, step = hidden.cast(there, self.dtype), step.to(there)
            here = there
            cache.set_layer(i)
            hidden = layer.mix(here, hidden, step)
            if i == last and outputs is not None:
                hidden = hidden.rows(here, outputs)
            hidden = layer.feed(here, hidden)
        if len(self.backend.devices) > 1:
            hidden = hidden.cast(ctx.input(), self.dtype)
        return hidden, step

    def _read_out(self, ctx: ml.Context, hidden: ml.Tensor) -> ml.Tensor:
        """F32 logits for the output of the last layer."""
        here = ctx.input()
        logits = self.logits(here, hidden)
        return logits if self.dtype is ml.DType.F32 else logits.cast(here, ml.DType.F32)

    def embed(self, ctx: ml.Context, batch: Batch) -> ml.Tensor:
        return nn.embedding(ctx, self._embedding, token_ids(batch))

    def logits(self, ctx: ml.Context, hidden: ml.Tensor) -> ml.Tensor:
        logits = self._head(ctx, hidden.rms_norm(ctx, self._norm, self.config.rms_norm_eps))
        return self.share.all_logits(ctx, logits, self.config.vocab_size) if self.share else logits


def token_ids(batch: Batch) -> ml.Indices:
    """The batch's inputs. Raises RequestError unless there is one token id per position."""
    if batch.inputs is None:
        raise RequestError("forward: the batch has no inputs; inputs must be the token ids")
    tokens: ml.Indices = batch.inputs
    count = len(tokens) if isinstance(tokens, (Sequence, np.ndarray)) else tokens.shape[0]
    if count != len(batch):
        raise RequestError(
            f"forward: {count} inputs for {len(batch)} positions; there must be one token for each"
        )
    return tokens
