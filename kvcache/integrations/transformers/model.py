"""A model of transformers that the engine drives: ``Engine(TransformersModel(model))``.

The engine starts a pass over the next tokens of all its requests and calls the model with them. Attention
reads K and V of each sequence from the engine's cache, as ``attn_implementation="kvcache"`` does it in an
HFCache; logits are computed of those tokens alone that the engine asks for.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

import ml
from kvcache import Batch, Cache, KVCacheError, NotSupportedError, StateCache, StateSpec
from kvcache.caches.wrapper import unwrapped
from kvcache.integrations.rows.caches import ModelCaches
from kvcache.integrations.transformers.arguments import check_model
from kvcache.integrations.transformers.bridge import bridge_to, dtype_of
from kvcache.integrations.transformers.cache import cache_argument
from kvcache.integrations.transformers.kinds import ATTENTION, Plan, Trait, layer_plan
from kvcache.integrations.transformers.packed import Call, Layout, PassCache, caches_of
from kvcache.integrations.transformers.places import device_of, opened
from kvcache.integrations.transformers.rope import rope_shift, rotation_limit
from kvcache.integrations.transformers.states import state_name
from kvcache.snapshots.layer_shapes import layers_of_cache
from kvcache.storage.layer_shape import LayerShape

__all__ = ["TransformersModel"]

_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.15}
"""How far logits may be from those of the model alone, relative to the largest: sums have other orders."""
_LOOKBACK = 64
"""Tokens that windows keep beside what they show, so that as many drafted ones can be taken back."""
_UNLIMITED = 1 << 24


@dataclass(frozen=True, slots=True)
class _Sizes:
    """A ``kvcache_engine.config.ModelSizes``: what is asked of the model's config, or was found by trying."""

    vocab_size: int
    max_positions: int
    eos_ids: tuple[int, ...]
    cached_layers: Mapping[int, LayerShape]
    windows: Mapping[int, int]
    """By layer, how many tokens of a sequence a window keeps."""
    states: int
    """Bytes of the recurrent states of one sequence."""

    def cached_tokens(self, layer: int, max_sequences: int, capacity: int, max_batch: int) -> int:
        kept = self.windows.get(layer, capacity)
        return max_sequences * capacity if kept >= capacity else max_sequences * kept + max_batch

    def state_bytes(self, max_sequences: int, capacity: int) -> int:
        return max_sequences * (1 + min(24, capacity // 256)) * self.states


class TransformersModel:
    """A ``LanguageModel``: a decoder of transformers, as it was loaded, for ``Engine`` and ``ModelDraft``.

    ::

        model = AutoModelForCausalLM.from_pretrained(folder)
        with Engine(TransformersModel(model)) as engine:
            answers = engine.complete([[1, 2, 3], [1, 2, 4]])

    Where it is made, the model computes a few tokens, of two sequences in several passes, and once more
    without a cache; where the logits differ in every ``layout``, it is refused: NotSupportedError, and the
    model is as it was. Else it keeps ``attn_implementation="kvcache"`` if it has one to choose, with which it
    still works by itself and with other caches.

    ``backend`` is where K and V are: one that is open, a name, or None for torch on the model's device.
    The weights, adapters included, must not change while an engine drives it: what is kept of prefixes was
    computed with those before (``Engine.forget``).
    """

    starts_passes: Literal[True] = True

    def __init__(self, model: Any, backend: ml.Backend | str | None = None) -> None:
        check_model("TransformersModel", model)
        plan = _plan_of(model)
        self.model, self.plan = model, plan
        self.device = device_of(model)
        self.dtype = dtype_of(model.dtype)
        self.backend = opened(backend, self.device, plan)
        self.layout = Layout.PACKED
        """How the tokens of a pass are given to the model."""
        self._bridge = bridge_to(self.backend)
        self._cache_name = cache_argument(model)
        self._takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._takes_positions = True
        self._placing = [part for part in model.modules() if "rope_deltas" in vars(part)]
        self._last: PassCache | None = None
        self._last_of: Any = None
        self.config = self._settle()

    def __repr__(self) -> str:
        return f"<TransformersModel: {type(self.model).__name__}, one call of it has {self.layout.value}>"

    def make_cache(self) -> Any:
        """A cache for the model's layers, still to be bound by ``init``."""
        plan, states, shift = self.plan, None, None
        with contextlib.suppress(NotSupportedError):
            shift = rope_shift(self.model.config)
        if plan.is_hybrid:
            two = {"conv": StateSpec(plan.conv_shape), "recurrent": StateSpec(plan.state_shape, ml.DType.F32)}
            states = StateCache({None: two if plan.conv_shape else {}}, dtype=self.dtype)
        return ModelCaches(plan.kinds, states, lookback=_LOOKBACK, shift=shift).all

    def identity(self) -> dict[str, str]:
        """Names the weights, the config and the dtype for stores: JSON-able. Reads all weights once."""
        total = hashlib.sha256()
        config = self.model.config.to_diff_dict()
        for name in ("_name_or_path", "transformers_version", "_attn_implementation"):
            config.pop(name, None)
        total.update(json.dumps(config, sort_keys=True, default=str).encode())
        for name, tensor in sorted(self.model.state_dict().items()):
            total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            flat = tensor.detach().reshape(-1).contiguous()
            if flat.numel():
                total.update(flat.view(torch.uint8).cpu().numpy())
        return {"transformers": total.hexdigest(), "dtype": self.dtype.name}

    def forward(self, ctx: ml.Context, batch: Batch, cache: Cache) -> ml.Tensor:
        """Logits F32 (len(batch.outputs), vocab_size) of the rows in ``batch.outputs``; None: of all.

        ``batch.inputs`` are token ids. Each call of the model is a pass of the cache, which is begun here.
        """
        given, ids = self._cache_of(cache), self._ids(batch)
        positions, sequences = np.asarray(batch.positions), np.asarray(batch.sequences)
        outputs = np.arange(len(positions)) if batch.outputs is None else np.asarray(batch.outputs, np.int64)
        found: torch.Tensor | None = None
        for chosen in self._calls(positions, sequences):
            there = np.flatnonzero(np.isin(outputs, chosen))
            order = np.argsort(chosen)
            wanted = order[np.searchsorted(chosen, outputs[there], sorter=order)]
            cache.start_forward(ctx, Batch(positions[chosen], sequences[chosen]))
            logits = self._call(ctx, given, ids[chosen], positions[chosen], sequences[chosen], wanted).float()
            if len(there) == len(outputs):
                found = logits
            elif found is None:
                found = logits.new_empty((len(outputs), logits.shape[-1]))
            if found is not logits:
                found[there] = logits
        assert found is not None
        return self._bridge.to_backend(ctx.input(), found)

    # One pass.

    def _ids(self, batch: Batch) -> torch.Tensor:
        """Token ids I64 (tokens,)."""
        inputs: Any = batch.inputs
        if hasattr(inputs, "native"):
            like = torch.empty(0, dtype=torch.int64, device=self.device)
            return self._bridge.to_torch(inputs, like)
        return torch.from_numpy(np.asarray(inputs, np.int64)).to(self.device)

    def _calls(self, positions: np.ndarray, sequences: np.ndarray) -> list[np.ndarray]:
        """Which of a pass's tokens each call of the model has."""
        if self.layout is Layout.PACKED:
            return [np.arange(len(positions))]
        order, first = np.unique(sequences, return_index=True)
        calls: dict[tuple[int, ...], list[np.ndarray]] = {}
        for row, seq in enumerate(order[np.argsort(first)]):
            run = np.flatnonzero(sequences == seq)
            started = bool(positions[run[0]])
            steps = run.reshape(-1, 1) if started and Trait.BY_ONE in self.plan.traits else [run]
            for step, part in enumerate(steps):
                alike = (step, len(part), started) if self.layout is Layout.ROWS else (row, step)
                calls.setdefault(alike, []).append(part)
        return [np.concatenate(parts) for parts in calls.values()]

    def _call(
        self,
        ctx: ml.Context,
        cache: PassCache,
        ids: torch.Tensor,
        positions: np.ndarray,
        sequences: np.ndarray,
        outputs: np.ndarray,
    ) -> torch.Tensor:
        """Logits (outputs, vocabulary) of one call, which is a pass of the cache."""
        starts = np.flatnonzero(np.diff(sequences, prepend=-1))
        counts = np.diff(starts, append=len(sequences))
        rows = len(starts) if self.layout is not Layout.PACKED else 1
        tokens = len(sequences) // rows
        cache.call = Call(
            ctx, sequences[starts].tolist(), positions[starts].tolist(), counts.tolist(), rows, tokens
        )
        given: dict[str, Any] = {"input_ids": ids.view(rows, tokens), self._cache_name: cache}
        if self._takes_positions:
            given["position_ids"] = torch.from_numpy(positions).to(self.device).view(rows, tokens)
        wanted = torch.from_numpy(outputs).to(self.device)
        some = self._takes_rows and rows == 1
        if some:
            given["logits_to_keep"] = wanted
        for part in self._placing:
            part.rope_deltas = None
        with torch.no_grad():
            logits: torch.Tensor = self.model(**given, use_cache=True).logits
        flat = logits.reshape(-1, logits.shape[-1])
        return flat if some else flat[wanted]

    def _cache_of(self, cache: Any) -> PassCache:
        if self._last is None or self._last_of is not cache:
            caches, recurrent = caches_of(self.plan, unwrapped(cache))
            attends = self.plan.attends
            self._last = PassCache(
                self.plan, caches, recurrent, self._bridge, self.device, self.layout, attends
            )
            self._last_of = cache
        return self._last

    # How it is driven.

    def _settle(self) -> _Sizes:
        """Find a layout in which the model gives what it gives alone; its sizes, or NotSupportedError."""
        before = getattr(self.plan.config, "_attn_implementation", None)
        expected = [self._without(text) for text in _TEXTS]
        refusals: list[str] = []
        try:
            for attends in (True, False):
                if not self._choose(ATTENTION if attends else before):
                    continue
                for layout, positions in self._ways(attends):
                    self.layout, self._takes_positions = layout, positions
                    try:
                        return self._try(expected)
                    except Exception as error:
                        refusals.append(f"{layout.value}: {_first_line(error)}")
        except BaseException:
            self._choose(before)
            raise
        self._choose(before)
        raise NotSupportedError(
            f"TransformersModel: {type(self.model).__name__} cannot be driven with "
            f"{'; nor with '.join(refusals)}; use model.generate with an HFCache"
        )

    def _choose(self, attention: str | None) -> bool:
        """Let the model attend so; whether it does."""
        if attention != getattr(self.plan.config, "_attn_implementation", None):
            with contextlib.suppress(ValueError, ImportError):
                self.model.set_attn_implementation(attention)
        return bool(getattr(self.plan.config, "_attn_implementation", None) == attention)

    def _ways(self, attends: bool) -> Iterator[tuple[Layout, bool]]:
        """Layouts, the fastest first, and whether positions are given: some models begin to count at 2."""
        positions = "position_ids" in inspect.signature(self.model.forward).parameters
        if positions and attends and not self.plan.indexed:
            yield (Layout.ROWS if self.plan.is_hybrid else Layout.PACKED), True
        if positions:
            yield Layout.ALONE, True
        yield Layout.ALONE, False

    def _try(self, expected: Sequence[np.ndarray]) -> _Sizes:
        """Passes over two sequences; NotSupportedError where the logits are not those ``expected``."""
        self._last = None
        cache = self.make_cache()
        cache.init(self.backend, ml.DType.F32, 2, 16, 16)
        worst = 0.0
        try:
            with self.backend.new_context() as ctx:
                for ends in _PASSES:
                    positions = [p for begin, end in ends for p in range(begin, end)]
                    sequences = [seq for seq, (begin, end) in enumerate(ends) for _ in range(begin, end)]
                    ids = [_TEXTS[seq][p] for seq, p in zip(sequences, positions, strict=True)]
                    outputs = range(len(ids)) if ends is _PASSES[0] else [len(ids) - 1]
                    batch = Batch(positions, sequences, inputs=ids, outputs=[*outputs])
                    logits = self.forward(ctx, batch, cache).to_numpy()
                    for i, row in zip(outputs, logits, strict=True):
                        right = expected[sequences[i]][positions[i]]
                        size = max(1e-6, float(np.abs(right).max()))
                        worst = max(worst, float(np.abs(row - right).max()) / size)
            if not worst <= _TOLERANCES[self.model.dtype]:
                raise NotSupportedError(
                    f"its logits are {worst:.2g} of the largest from those of the model alone"
                )
            return self._sizes(cache, expected[0].shape[-1])
        finally:
            cache.close()
            self._last = self._last_of = None

    def _without(self, text: Sequence[int]) -> np.ndarray:
        """Logits (tokens, vocabulary) of a text without a cache."""
        ids = torch.tensor([text], device=self.device)
        for part in self._placing:
            part.rope_deltas = None
        with torch.no_grad():
            found: np.ndarray = self.model(input_ids=ids, use_cache=False).logits[0].float().cpu().numpy()
        return found

    def _sizes(self, cache: Any, vocabulary: int) -> _Sizes:
        decoder, plan = self.model.config.get_text_config(decoder=True), self.plan
        caches, recurrent = caches_of(plan, unwrapped(cache))
        windows = {
            layer: cache.memory + 1
            for kind, cache in caches.items()
            for layer in cache.storage.buffers
            if hasattr(cache, "memory")
        }
        limit = rotation_limit(self.model.config)
        most = [_positions(decoder)] + ([] if limit is None else [limit[0]])
        ids = [getattr(config, "eos_token_id", None) for config in (self.model.generation_config, decoder)]
        eos: Any = next((one for one in ids if one is not None), [])
        states = 0
        for layer, count in enumerate(plan.states):
            for name in ("conv", "recurrent"):
                for i in range(count):
                    spec = None if recurrent is None else recurrent.state_spec(state_name(name, i), layer)
                    states += math.prod(spec.shape) * 4 if spec is not None else 0
        return _Sizes(
            vocab_size=vocabulary,
            max_positions=min(most),
            eos_ids=tuple(eos if isinstance(eos, list | tuple) else [eos]),
            cached_layers=dict(layers_of_cache(cache)),
            windows=windows,
            states=states,
        )


_TEXTS = ((5, 9, 4, 12, 7, 3), (7, 3, 11, 6, 8))
_PASSES = (((0, 3), (0, 2)), ((3, 5), (2, 3)), ((5, 6), (3, 4)), ((6, 6), (4, 5)))
"""Of these two texts, begin and end in each pass."""


def _plan_of(model: Any) -> Plan:
    """The plan of a model that may be driven. NotSupportedError for those that have no tokens to come."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise NotSupportedError(f"TransformersModel: {name} has an encoder, whose input is no text before")
    if model.training:
        raise NotSupportedError(f"TransformersModel: {name} is in training mode; call model.eval()")
    plan = layer_plan(model.config)
    if getattr(plan.config, "use_bidirectional_attention", None) in (True, "all") or (
        getattr(plan.config, "is_causal", True) is False
    ):
        raise NotSupportedError(f"TransformersModel: in {name} tokens attend to later ones too")
    for trait in (Trait.INSIDE, Trait.UNEVEN, Trait.COMPRESSED, Trait.OWN_CLASS):
        plan.refuse("TransformersModel", trait, "use model.generate with an HFCache")
    if model.dtype not in _TOLERANCES:
        raise NotSupportedError(f"TransformersModel: {name} computes in {model.dtype}")
    return plan


def _positions(config: Any) -> int:
    """How many positions a config says that there are; as good as unlimited where it says nothing."""
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"):
        if isinstance(found := getattr(config, name, None), int) and found > 0:
            return found
    return _UNLIMITED


def _first_line(error: Exception) -> str:
    told = (str(error).strip() or "it says nothing").splitlines()[0]
    return told if isinstance(error, KVCacheError | ml.MLError) else f"{type(error).__name__}: {told}"
