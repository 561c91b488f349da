"""Gemma 3n, text only, written once on ml.nn: streams, embeddings per layer, shared keys and values.

transformers' modeling_gemma3n.py. AltUp (Baykal et al., 2023, arXiv 2301.13310) carries several versions of
the hidden states and sends one, the active one, through a layer; the others are predicted and corrected::

    streams = predict(streams)
    x = norm(active)
    mixed = (active + norm(attend(x)) + laurel(x)) / sqrt(2)     laurel: a residual of low rank
    fed = mixed + norm(mlp(norm(mixed)))                         the first layers keep the largest gates only
    streams = correct(streams, fed)
    streams[1:] += norm(project(gelu(gate(active)) * embedding of the token for this layer))

The last layers put nothing: they attend over what the last layer of their type before them has put in the
same pass, as YOCO's do (Sun et al., 2024, arXiv 2405.05254). The cache stores the layers before them alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

import ml
from kvcache import WrapperCache
from kvcache.cache import Batch, Cache
from kvcache_engine.config import refuse
from kvcache_engine.errors import ModelError
from kvcache_engine.models.attention import Attention, attention_shapes, load_attention, merge_heads
from kvcache_engine.models.decoder import CausalModel, token_ids
from kvcache_engine.models.feedforward import Activation, geglu, load_mlp, mlp_shapes
from kvcache_engine.models.gemma3 import AFTER, BEFORE, begin_gemma, capped, embedding_scale, gemma_fields
from kvcache_engine.models.layer_types import SlidingConfig, sliding_cache
from kvcache_engine.models.step import Layer, Norms, Step, load_norms, norm_shapes
from kvcache_engine.weights import Linear, Loader, Shape
from ml import nn

__all__ = ["Gemma3n", "Gemma3nConfig", "parse"]

_PATTERN = 5
_INPUTS = "per_layer_inputs"


@dataclass(frozen=True, slots=True)
class Gemma3nConfig(SlidingConfig):
    """``inner_sizes[i]`` is the width of layer i's MLP, of which all but a share ``sparsity[i]`` of the gates
    is kept. Layer i reads the keys and values of layer ``sources[i]``, its own or an earlier layer's.
    ``streams`` are the versions of the hidden states.
    """

    logit_softcap: float | None
    inner_sizes: tuple[int, ...]
    sparsity: tuple[float, ...]
    sources: tuple[int, ...]
    streams: int
    active: int
    scaled: bool
    laurel_rank: int
    input_size: int
    input_vocab: int

    @property
    def attending(self) -> Sequence[int]:
        return [i for i in range(self.layers) if self.sources[i] == i]


def parse(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> Gemma3nConfig:
    refuse(raw, {"hidden_activation": ["gelu_pytorch_tanh"]})
    refuse(raw, {"use_bidirectional_attention": [False, None]})
    count = raw["num_hidden_layers"]
    inner = _each(raw, "intermediate_size", count, raw["intermediate_size"])
    usual = [0.95] * 10 + [0.0] * (count - 10) if count > 10 else 0.0
    sparsity = tuple(float(share) for share in _each(raw, "activation_sparsity_pattern", count, usual))
    if not all(0.0 <= share < 1.0 for share in sparsity):
        raise ModelError(f"activation_sparsity_pattern={list(sparsity)}; shares must be in [0, 1)")
    streams, active = raw["altup_num_inputs"], raw["altup_active_idx"]
    if streams < 1 or not 0 <= active < streams:
        raise ModelError(f"altup_active_idx={active} of altup_num_inputs={streams}; it must be one of them")
    fields = gemma_fields(
        {**raw, "intermediate_size": max(inner)}, generation, "Gemma3nForCausalLM", _PATTERN
    )
    return Gemma3nConfig(
        **fields,
        inner_sizes=inner,
        sparsity=sparsity,
        sources=_sources(fields["kinds"], raw["num_kv_shared_layers"]),
        streams=streams,
        active=active,
        scaled=bool(raw["altup_correct_scale"]),
        laurel_rank=raw["laurel_rank"],
        input_size=raw["hidden_size_per_layer_input"],
        input_vocab=raw["vocab_size_per_layer_input"],
    )


def _each(raw: Mapping[str, Any], name: str, count: int, usual: Any) -> tuple[Any, ...]:
    """One value for each layer, of a list or of one number."""
    given = raw.get(name)
    given = usual if given is None else given
    values = tuple(given) if isinstance(given, Sequence) else (given,) * count
    if len(values) != count:
        raise ModelError(f"{len(values)} values in {name} for {count} layers; there must be one for each")
    return values


def _sources(kinds: Sequence[str], shared: int) -> tuple[int, ...]:
    """Whose keys and values each layer reads, if the last ``shared`` have none of their own."""
    first = len(kinds) - shared
    last = {kind: i for i, kind in enumerate(kinds[: max(first, 0)])}
    missing = sorted(set(kinds) - set(last))
    if missing or shared < 0:
        raise ModelError(
            f"num_kv_shared_layers={shared} of {len(kinds)} layers; there must be a layer of each type "
            "before those that share its keys and values"
        )
    return tuple(i if i < first else last[kind] for i, kind in enumerate(kinds))


_SMALLEST = 1e-5
"""What a mean square counts as at least, where it divides."""


@dataclass(frozen=True, slots=True)
class AltUp:
    """Of one layer. With m = tanh(router(norm(active)) / hidden_size), one number per stream::

        predict    streams[i] += sum over j of P(m)[i, j] streams[j]
        correct    streams[i] += (1 + C(m)[i]) (computed - streams[active])      m of what was computed

    ``corrections`` has a bias of ones; ``scale`` (hidden_size,) weighs ``output``.
    """

    norm: ml.Tensor
    router: Linear
    predictions: Linear
    corrections: Linear
    scale: ml.Tensor | None
    streams: int
    active: int
    eps: float

    def predict(self, ctx: ml.Context, hidden: ml.Tensor) -> ml.Tensor:
        """hidden (tokens, streams, hidden_size) -> the same, before the layer."""
        routes = self._routes(ctx, self.active_of(ctx, hidden))
        mix = self.predictions(ctx, routes).reshape(ctx, hidden.shape[0], self.streams, self.streams)
        return mix.matmul(ctx, hidden).add(ctx, hidden)

    def correct(self, ctx: ml.Context, predicted: ml.Tensor, computed: ml.Tensor) -> ml.Tensor:
        """predicted (tokens, streams, hidden_size), computed (tokens, hidden_size) -> as predicted."""
        tokens, size = computed.shape
        share = self.corrections(ctx, self._routes(ctx, computed)).reshape(ctx, tokens, self.streams, 1)
        news = computed.sub(ctx, self.active_of(ctx, predicted)).reshape(ctx, tokens, 1, size)
        return share.mul(ctx, news).add(ctx, predicted)

    def active_of(self, ctx: ml.Context, hidden: ml.Tensor) -> ml.Tensor:
        """hidden (tokens, streams, hidden_size) -> (tokens, hidden_size)."""
        tokens, _, size = hidden.shape
        return hidden.slice(ctx, 1, self.active, self.active + 1).reshape(ctx, tokens, size)

    def output(self, ctx: ml.Context, hidden: ml.Tensor) -> ml.Tensor:
        """``active_of`` hidden, scaled."""
        active = self.active_of(ctx, hidden)
        return active if self.scale is None else active.mul(ctx, self.scale)

    def _routes(self, ctx: ml.Context, x: ml.Tensor) -> ml.Tensor:
        """x (tokens, hidden_size) -> (tokens, streams)."""
        routed = self.router(ctx, x.rms_norm(ctx, self.norm, self.eps))
        return routed.scale(ctx, 1 / x.shape[1]).tanh(ctx)


def _load_altup(load: Loader, ctx: ml.Context, prefix: str, config: Gemma3nConfig) -> AltUp:
    """Of the tensors below ``prefix``."""
    scale = load.tensor(ctx, f"{prefix}.correct_output_scale")
    ones = load.put(ctx, np.ones(config.streams, np.float32))
    return AltUp(
        norm=load.norm(ctx, f"{prefix}.router_norm"),
        router=load.linear(ctx, f"{prefix}.modality_router"),
        predictions=load.linear(ctx, f"{prefix}.prediction_coefs"),
        corrections=replace(load.linear(ctx, f"{prefix}.correction_coefs"), bias=ones),
        scale=scale if config.scaled else None,
        streams=config.streams,
        active=config.active,
        eps=config.rms_norm_eps,
    )


def _magnitude(ctx: ml.Context, x: ml.Tensor, least: float | None = None) -> ml.Tensor:
    """x (tokens, size) -> F32 (tokens, 1), the root of the mean square, which is at least ``least``."""
    x = x.cast(ctx, ml.DType.F32)
    square = x.mul(ctx, x).mean(ctx, 1, keepdims=True)
    return (square if least is None else square.clamp(ctx, least, None)).sqrt(ctx)


def _rescaled(ctx: ml.Context, x: ml.Tensor, target: ml.Tensor) -> ml.Tensor:
    """x (tokens, size) with the magnitude ``target``, F32 (tokens, 1)."""
    share = target.div(ctx, _magnitude(ctx, x, _SMALLEST))
    return x.cast(ctx, ml.DType.F32).mul(ctx, share).cast(ctx, x.dtype)


@dataclass(frozen=True, slots=True)
class _SharedAttention:
    """Queries alone: keys and values are what layer ``source`` has put in this pass, and before.

    ``set_layer`` names the layer that is read; nothing is put.
    """

    query: Linear
    norm: ml.Tensor
    output: Linear
    eps: float
    source: int
    rotation: str

    def __call__(self, ctx: ml.Context, x: ml.Tensor, step: Step) -> ml.Tensor:
        """x (tokens, hidden_size) -> the same."""
        head_dim = self.norm.shape[0]
        query = self.query(ctx, x)
        query = query.reshape(ctx, x.shape[0], query.shape[1] // head_dim, head_dim)
        query = step.rotations[self.rotation].apply(ctx, query.rms_norm(ctx, self.norm, self.eps))
        step.cache.set_layer(self.source)
        there = ctx.layer(self.source)
        if there is ctx:
            attended = step.cache.attend(ctx, query, 1.0)
        else:  # where the keys and values lie
            attended = step.cache.attend(there, query.cast(there, query.dtype), 1.0).cast(ctx, query.dtype)
        return self.output(ctx, merge_heads(ctx, attended))


@dataclass(frozen=True, slots=True)
class _Layer:
    """A decoder's ``Layer`` on streams (tokens, streams, hidden_size).

    What ``mix`` gives to ``feed`` is one row per token: the predicted streams, what was mixed, and the
    embedding of the token for this layer.
    """

    index: int
    cache_kind: int
    eps: float
    altup: AltUp
    norms: Norms
    after: Norms
    mixer: Attention | _SharedAttention
    laurel: tuple[Linear, Linear]
    laurel_norm: ml.Tensor
    mlp: Any
    gate: Linear
    project: Linear
    input_norm: ml.Tensor

    def mix(self, ctx: ml.Context, hidden: ml.Tensor, step: Step) -> ml.Tensor:
        step.cache.set_layer_type(self.cache_kind)
        predicted = self.altup.predict(ctx, hidden)
        (tokens, streams, size), inputs = predicted.shape, step.tensors[_INPUTS]
        active = self.altup.active_of(ctx, predicted)
        x = active.rms_norm(ctx, self.norms[0], self.eps)
        left, right = self.laurel
        residual = x.add(ctx, right(ctx, left(ctx, x)).rms_norm(ctx, self.laurel_norm, self.eps))
        mixed = active.add(ctx, self.mixer(ctx, x, step).rms_norm(ctx, self.after[0], self.eps))
        mixed = mixed.add(ctx, residual).scale(ctx, 1 / math.sqrt(2))
        own = inputs.slice(ctx, 1, self.index, self.index + 1).reshape(ctx, tokens, inputs.shape[2])
        return predicted.reshape(ctx, tokens, streams * size).concat(ctx, mixed, 1).concat(ctx, own, 1)

    def feed(self, ctx: ml.Context, hidden: ml.Tensor) -> ml.Tensor:
        (tokens, end), size, streams = hidden.shape, self.input_norm.shape[0], self.altup.streams
        wide = streams * size
        predicted = hidden.slice(ctx, 1, 0, wide).reshape(ctx, tokens, streams, size)
        mixed = hidden.slice(ctx, 1, wide, wide + size)
        fed = self.mlp(ctx, mixed.rms_norm(ctx, self.norms[1], self.eps))
        fed = mixed.add(ctx, fed.rms_norm(ctx, self.after[1], self.eps))
        corrected = self.altup.correct(ctx, predicted, fed)
        if streams == 1:
            return corrected
        gate = self.gate(ctx, self.altup.output(ctx, corrected))
        added = self.project(ctx, geglu(ctx, gate, hidden.slice(ctx, 1, wide + size, end)))
        added = added.rms_norm(ctx, self.input_norm, self.eps).reshape(ctx, tokens, 1, size)
        first, others = corrected.slice(ctx, 1, 0, 1), corrected.slice(ctx, 1, 1, streams)
        return first.concat(ctx, others.add(ctx, added), 1)


def _largest_gates(share: float) -> Activation:
    """geglu of the gates above the quantile ``share`` of a normal distribution like theirs."""
    deviations = NormalDist().inv_cdf(share)

    def activation(ctx: ml.Context, gate: ml.Tensor, up: ml.Tensor) -> ml.Tensor:
        apart = gate.sub(ctx, gate.mean(ctx, 1, keepdims=True))
        deviation = apart.mul(ctx, apart).mean(ctx, 1, keepdims=True).sqrt(ctx)
        return geglu(ctx, apart.sub(ctx, deviation.scale(ctx, deviations)).relu(ctx), up)

    return activation


class Gemma3n(CausalModel[Gemma3nConfig]):
    cache_type = WrapperCache
    cache_of = staticmethod(sliding_cache)

    @classmethod
    def shapes(cls, config: Any) -> dict[str, Shape]:
        hidden, width = config.hidden_size, config.layers * config.input_size
        found = super().shapes(config)
        found["model.embed_tokens_per_layer.weight"] = (config.input_vocab, width)
        found["model.per_layer_model_projection.weight"] = (width, hidden)
        found["model.per_layer_projection_norm.weight"] = (config.input_size,)
        for i in range(config.streams - 1):
            for name in ("altup_projections", "altup_unembed_projections"):
                found[f"model.{name}.{i}.weight"] = (hidden, hidden)
        return found

    @classmethod
    def layer_shapes(cls, config: Any, i: int) -> dict[str, Shape]:
        hidden, rank, streams = config.hidden_size, config.laurel_rank, config.streams
        attention = attention_shapes(config)
        if config.sources[i] != i:
            attention = {name: shape for name, shape in attention.items() if name[10:12] in ("q_", "o_")}
        return {
            **attention,
            **norm_shapes(hidden, BEFORE + AFTER),
            **mlp_shapes("mlp", hidden, config.inner_sizes[i]),
            "altup.correct_output_scale": (hidden,),
            "altup.correction_coefs.weight": (streams, streams),
            "altup.prediction_coefs.weight": (streams * streams, streams),
            "altup.modality_router.weight": (streams, hidden),
            "altup.router_norm.weight": (hidden,),
            "laurel.linear_left.weight": (rank, hidden),
            "laurel.linear_right.weight": (hidden, rank),
            "laurel.post_laurel_norm.weight": (hidden,),
            "per_layer_input_gate.weight": (config.input_size, hidden),
            "per_layer_projection.weight": (hidden, config.input_size),
            "post_per_layer_input_norm.weight": (hidden,),
        }

    def _load_more(self, load: Loader, ctx: ml.Context) -> None:
        streams = range(self.config.streams - 1)
        self._inputs = load.tensor(ctx, "model.embed_tokens_per_layer.weight")
        self._input_projection = load.linear(ctx, "model.per_layer_model_projection")
        self._input_norm = load.norm(ctx, "model.per_layer_projection_norm")
        self._streams = [load.linear(ctx, f"model.altup_projections.{i}") for i in streams]
        self._joins = [load.linear(ctx, f"model.altup_unembed_projections.{i}") for i in streams]

    def _embedded(self, ctx: ml.Context, batch: Batch) -> ml.Tensor:
        return super().embed(ctx, batch).scale(ctx, embedding_scale(self.config.hidden_size, self.dtype))

    def embed(self, ctx: ml.Context, batch: Batch) -> ml.Tensor:
        """(tokens, streams, hidden_size): the embedding and maps of it, all of its magnitude."""
        first = self._embedded(ctx, batch)
        (tokens, size), target = first.shape, _magnitude(ctx, first)
        hidden = first.reshape(ctx, tokens, 1, size)
        for stream in self._streams:
            other = _rescaled(ctx, stream(ctx, first), target)
            hidden = hidden.concat(ctx, other.reshape(ctx, tokens, 1, size), 1)
        return hidden

    def begin_pass(self, ctx: ml.Context, batch: Batch, cache: Cache) -> Step:
        step = begin_gemma(ctx, batch, cache, self.config)
        step.tensors[_INPUTS] = self._per_layer_inputs(ctx, batch)
        return step

    def _per_layer_inputs(self, ctx: ml.Context, batch: Batch) -> ml.Tensor:
        """(tokens, layers, input_size): of each token a part that is looked up, and one of its embedding."""
        config, tokens = self.config, token_ids(batch)
        if config.input_vocab < config.vocab_size:  # tokens beyond the table count as token 0
            if isinstance(tokens, (Sequence, np.ndarray)):
                tokens = ctx.from_numpy(np.asarray(tokens), ml.DType.I32)
            end = ctx.full((1,), config.input_vocab, ml.DType.I32)
            tokens = tokens.compare(ctx, "lt", end).where(ctx, tokens, ctx.zeros((1,), ml.DType.I32))
        found = nn.embedding(ctx, self._inputs, tokens)
        found = found.scale(ctx, embedding_scale(config.input_size, self.dtype))
        projected = self._input_projection(ctx, self._embedded(ctx, batch)).scale(
            ctx, config.hidden_size**-0.5
        )
        shape = len(batch), config.layers, config.input_size
        projected = projected.reshape(ctx, *shape).rms_norm(ctx, self._input_norm, config.rms_norm_eps)
        return projected.add(ctx, found.reshape(ctx, *shape)).scale(ctx, 1 / math.sqrt(2))

    def logits(self, ctx: ml.Context, hidden: ml.Tensor) -> ml.Tensor:
        """Of the mean of all streams, mapped back and brought to the magnitude of the first."""
        tokens, streams, size = hidden.shape
        each = [hidden.slice(ctx, 1, i, i + 1).reshape(ctx, tokens, size) for i in range(streams)]
        joined, target = each[0], _magnitude(ctx, each[0])
        for join, stream in zip(self._joins, each[1:], strict=True):
            joined = joined.add(ctx, _rescaled(ctx, join(ctx, stream), target))
        return capped(ctx, super().logits(ctx, joined.scale(ctx, 1 / streams)), self.config.logit_softcap)

    def _layer(self, load: Loader, ctx: ml.Context, i: int) -> Layer:
        config, prefix = self.config, f"model.layers.{i}"
        eps, share = config.rms_norm_eps, config.sparsity[i]
        left, right = (load.linear(ctx, f"{prefix}.laurel.linear_{side}") for side in ("left", "right"))
        return _Layer(
            index=i,
            cache_kind=config.cache_kind(i),
            eps=eps,
            altup=_load_altup(load, ctx, f"{prefix}.altup", config),
            norms=load_norms(load, ctx, prefix, names=BEFORE),
            after=load_norms(load, ctx, prefix, names=AFTER),
            mixer=self._attention(load, ctx, i),
            laurel=(left, right),
            laurel_norm=load.norm(ctx, f"{prefix}.laurel.post_laurel_norm"),
            mlp=load_mlp(load, ctx, f"{prefix}.mlp", _largest_gates(share) if share else geglu),
            gate=load.linear(ctx, f"{prefix}.per_layer_input_gate"),
            project=load.linear(ctx, f"{prefix}.per_layer_projection"),
            input_norm=load.norm(ctx, f"{prefix}.post_per_layer_input_norm"),
        )

    def _attention(self, load: Loader, ctx: ml.Context, i: int) -> Attention | _SharedAttention:
        config, prefix = self.config, f"model.layers.{i}.self_attn"
        if config.sources[i] == i:
            rotation = config.kinds[i]
            return load_attention(load, ctx, prefix, config, scale=1.0, value_norm=True, rotation=rotation)
        return _SharedAttention(
            query=load.linear(ctx, f"{prefix}.q_proj"),
            norm=load.norm(ctx, f"{prefix}.q_norm"),
            output=load.linear(ctx, f"{prefix}.o_proj"),
            eps=config.rms_norm_eps,
            source=config.sources[i],
            rotation=config.kinds[i],
        )
