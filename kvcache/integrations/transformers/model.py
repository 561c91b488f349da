"""A model of transformers for the engine: ``Engine(TransformersModel(model))``. The engine starts a pass over
the next tokens of all its requests and calls the model with them. Attention reads K and V of each sequence
from the engine's cache, as ``attn_implementation="kvcache"`` does with an HFCache; logits are computed only
for the tokens that the engine requests.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import transformers

import ml
from kvcache import Batch, NotSupportedError, StateCache, StateSpec, layers_of_cache
from kvcache.integrations.loaded_folder import LoadedFolder
from kvcache.integrations.rows.caches import ModelCaches
from kvcache.integrations.rows.driven import LOOKBACK, DrivenModel, Layout, Sizes, positions_in
from kvcache.integrations.transformers.adapters import Adapters
from kvcache.integrations.transformers.arguments import check_model
from kvcache.integrations.transformers.attention import silently
from kvcache.integrations.transformers.bridge import bridge_to, dtype_of, torch_dtype
from kvcache.integrations.transformers.cache import cache_argument
from kvcache.integrations.transformers.kinds import ATTENTION, Plan, Trait, layer_plan
from kvcache.integrations.transformers.packed import Call, PassCache
from kvcache.integrations.transformers.places import device_of, opened
from kvcache.integrations.transformers.rope import rope_shift, rotation_limit
from kvcache.integrations.transformers.states import state_name
from kvcache.stores import Part

__all__ = ["TransformersModel"]


class TransformersModel(DrivenModel):
    """A ``LanguageModel``: a decoder of transformers, as it was loaded, for ``Engine`` and ``ModelDraft``.

    ::

        model = AutoModelForCausalLM.from_pretrained(folder)
        with Engine(TransformersModel(model)) as engine:
            answers = engine.complete([[1, 2, 3], [1, 2, 4]])

    The constructor computes a few tokens of two sequences in several passes, and once more without a cache.
    If the logits differ in every ``layout``, it raises NotSupportedError and leaves the model unchanged.
    Otherwise the model keeps ``attn_implementation="kvcache"`` if it supports the choice; it still works on
    its own and with other caches.

    ``backend`` stores K and V: an open one, a name, or None for torch on the model's device. The model's
    weights and adapters may change while no request is running: cached tokens are reused only by requests
    with the same adapters, as in HFPrefixCache.
    """

    def __init__(self, model: Any, backend: ml.Backend | str | None = None) -> None:
        check_model("TransformersModel", model)
        plan = _plan_of(model)
        self.model, self.plan = model, plan
        self._folder: LoadedFolder | None = None
        self.device = device_of(model)
        self.dtype = dtype_of(model.dtype)
        self.backend = opened(backend, self.device, plan)
        self._bridge = bridge_to(self.backend)
        self._cache_name = cache_argument(model)
        self._takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._takes_positions = True
        self._placing = [part for part in model.modules() if "rope_deltas" in vars(part)]
        self._adapters = Adapters(model)
        self._last: PassCache | None = None
        self._last_of: Any = None
        before = getattr(plan.config, "_attn_implementation", None)
        try:
            self.config = self.settled(
                self._ways(before), type(model).__name__, "use model.generate with an HFCache"
            )
        except BaseException:
            self._choose(before)
            raise
        finally:
            self._last = self._last_of = None

    @classmethod
    def load(cls, folder: str | os.PathLike[str], backend: ml.Backend, dtype: ml.DType) -> TransformersModel:
        """The model in a folder, converted to ``dtype``, on the first device of a torch ``backend``. It is
        for serving: on a CPU, its F32 weights are views of one array, and some of them column-major, which
        transformers' ``save_pretrained`` refuses.
        """
        loaded = LoadedFolder(folder)
        made, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch_dtype(dtype), output_loading_info=True
        )
        if report["missing_keys"] or report["mismatched_keys"]:
            loaded.doubt = "transformers has initialized weights that its files lack"
        with torch.inference_mode(False), torch.no_grad():  # else weights of that mode could not be trained
            _for_serving(made.to(backend.devices[0].name))
        model = cls(made.eval(), backend)
        model._folder = loaded
        return model

    def __repr__(self) -> str:
        return f"<TransformersModel: {type(self.model).__name__}, one call of it has {self.layout.value}>"

    def make_cache(self) -> Any:
        """A cache for the model's layers, not yet bound by ``init``."""
        plan, states, shift = self.plan, None, None
        with contextlib.suppress(NotSupportedError):
            shift = rope_shift(self.model.config)
        if plan.is_hybrid:
            two = {"conv": StateSpec(plan.conv_shape), "recurrent": StateSpec(plan.state_shape, ml.DType.F32)}
            states = StateCache({None: two if plan.conv_shape else {}}, dtype=self.dtype)
        return ModelCaches(plan.kinds, states, lookback=LOOKBACK, shift=shift).all

    def variant(self) -> Part:
        """Identifies adapters and changes of the weights since construction."""
        return self._adapters.variant()

    def identity(self) -> dict[str, str]:
        """The identity of weights, config and dtype for stores, in JSON values; reads all weights once.

        For a model from ``load`` this is ``kvcache.stores.identity_of`` of its folder, which other runtimes
        share if they compute the same keys and values from it. Otherwise the log says why not, and only
        processes with transformers share it.
        """
        if self._folder is not None:
            rotation = {"rope_parameters": getattr(self.model.config, "rope_parameters", None)}
            if (shared := self._folder.identity(self.dtype, "transformers", rotation)) is not None:
                return shared
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

    def call(
        self, ctx: ml.Context, cache: Any, ids: Any, positions: np.ndarray, sequences: np.ndarray,
        outputs: np.ndarray,
    ) -> ml.Tensor:  # fmt: skip
        """Logits F32 (outputs, vocabulary) of one call of the model, which is one pass of the cache."""
        cache.start_forward(ctx, Batch(positions.tolist(), sequences.tolist()))
        passing = self._cache_of(cache)
        starts = [0, *(np.flatnonzero(sequences[1:] != sequences[:-1]) + 1).tolist()]
        counts = [stop - start for start, stop in itertools.pairwise([*starts, len(sequences)])]
        rows = len(starts) if self.layout is not Layout.PACKED else 1
        tokens = len(sequences) // rows
        passing.call = Call(ctx, sequences[starts].tolist(), positions[starts].tolist(), counts, rows, tokens)
        arguments: dict[str, Any] = {
            "input_ids": self._ids(ids).view(rows, tokens),
            self._cache_name: passing,
        }
        if self._takes_positions:
            arguments["position_ids"] = torch.from_numpy(positions).to(self.device).view(rows, tokens)
        wanted = torch.from_numpy(outputs).to(self.device)
        some = self._takes_rows and rows == 1
        if some:
            arguments["logits_to_keep"] = wanted
        for part in self._placing:
            part.rope_deltas = None
        with torch.inference_mode():
            logits: torch.Tensor = self.model(**arguments, use_cache=True).logits
        flat = logits.reshape(-1, logits.shape[-1])
        return self._bridge.to_backend(ctx.input(), (flat if some else flat[wanted]).float())

    def _ids(self, ids: Any) -> torch.Tensor:
        """Token ids I64 (tokens,)."""
        if hasattr(ids, "native"):
            like = torch.empty(0, dtype=torch.int64, device=self.device)
            return self._bridge.to_torch(ids, like)
        return torch.from_numpy(ids).to(self.device)

    def _steps(self, run: np.ndarray, positions: np.ndarray) -> Iterable[np.ndarray]:
        """The tokens of one sequence; one by one if the model continues a state by only one token at a
        time.
        """
        return run.reshape(-1, 1) if positions[run[0]] and Trait.BY_ONE in self.plan.traits else [run]

    def _cache_of(self, cache: Any) -> PassCache:
        if self._last is None or self._last_of is not cache:
            own = ModelCaches.over(self.plan.kinds, cache)
            self._last = PassCache(self.plan, own.caches, own.states, self._bridge, self.device, self.layout)
            self._last_of = cache
        return self._last

    # Choosing a layout.

    def _choose(self, attention: str | None) -> bool:
        """Set the model's attention implementation; returns whether it was accepted."""
        if attention != getattr(self.plan.config, "_attn_implementation", None):
            with contextlib.suppress(ValueError, ImportError):
                self.model.set_attn_implementation(attention)
        return bool(getattr(self.plan.config, "_attn_implementation", None) == attention)

    def _ways(self, before: str | None) -> Iterator[None]:
        """Ways to run the model, fastest first: attention implementation, layout, and whether positions are
        passed. Some models count positions from 2.
        """
        positions = "position_ids" in inspect.signature(self.model.forward).parameters
        for attends in (True, False):
            if not self._choose(ATTENTION if attends else before):
                continue
            if positions and attends and not self.plan.indexed:
                self.layout = Layout.ROWS if self.plan.is_hybrid else Layout.PACKED
                yield
            self.layout = Layout.ALONE
            for self._takes_positions in (True, False) if positions else (False,):
                yield

    def without(self, text: Sequence[int]) -> np.ndarray:
        """Logits (tokens, vocabulary) of a text without a cache."""
        ids = torch.tensor([text], device=self.device)
        for part in self._placing:
            part.rope_deltas = None
        with torch.no_grad(), silently():
            logits: np.ndarray = self.model(input_ids=ids, use_cache=False).logits[0].float().cpu().numpy()
        return logits

    def sizes(self, cache: Any, vocabulary: int) -> Sizes:
        """The sizes from the layers' storage and the model's config."""
        decoder, plan = self.model.config.get_text_config(decoder=True), self.plan
        own = ModelCaches.over(plan.kinds, cache)
        windows = {
            layer: cache.memory + 1
            for cache in own.caches.values()
            for layer in cache.storage.buffers
            if hasattr(cache, "memory")
        }
        limit = rotation_limit(self.model.config)
        most = [positions_in(decoder)] + ([] if limit is None else [limit[0]])
        ids = [getattr(config, "eos_token_id", None) for config in (self.model.generation_config, decoder)]
        eos: Any = next((one for one in ids if one is not None), [])
        states = 0
        for layer, count in enumerate(plan.states):
            for name in ("conv", "recurrent"):
                for i in range(count):
                    spec = None if own.states is None else own.states.state_spec(state_name(name, i), layer)
                    states += math.prod(spec.shape) * 4 if spec is not None else 0
        return Sizes(
            vocab_size=vocabulary,
            max_positions=min(most),
            eos_ids=tuple(eos if isinstance(eos, list | tuple) else [eos]),
            cached_layers=dict(layers_of_cache(cache)),
            windows=windows,
            states=states,
        )


def _for_serving(model: Any) -> None:
    """Copy the F32 weights of a CPU to one array of NumPy, which on Linux has huge pages: MKL multiplies one
    row by them in 0.85 of the time on an AMD EPYC. Linear layers with more outputs than inputs are stored
    column-major, which takes 0.5 to 0.9 for one row, 0.9 to 1.15 for 8 and 0.9 to 1.0 for 128.
    """
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return
    linear = [part.weight for part in model.modules() if isinstance(part, torch.nn.Linear)]
    turned = {id(weight) for weight in linear if weight.shape[0] > weight.shape[1]}
    weights = [x for x in model.parameters() if x.device.type == "cpu" and x.dtype == torch.float32]
    *starts, size = itertools.accumulate((-(-x.numel() // 16) * 16 for x in weights), initial=0)
    whole = torch.from_numpy(np.empty(size, np.float32))
    for weight, start in zip(weights, starts, strict=True):
        data = weight.data.t() if id(weight) in turned else weight.data
        copy = whole[start : start + data.numel()].view(data.shape).copy_(data)
        weight.data = copy.t() if id(weight) in turned else copy


def _plan_of(model: Any) -> Plan:
    """The plan of a supported model. Raises NotSupportedError for models that do not generate text from
    tokens alone.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise NotSupportedError(f"TransformersModel: {name} has an encoder, whose input is no text before")
    if model.training:
        raise NotSupportedError(f"TransformersModel: {name} is in training mode; call model.eval()")
    plan = layer_plan(model.config)
    if getattr(plan.config, "use_bidirectional_attention", None) in (True, "all") or (
        getattr(plan.config, "is_causal", True) is False
    ):
        raise NotSupportedError(f"TransformersModel: in {name}, tokens attend to later ones too")
    for trait in (Trait.INSIDE, Trait.UNEVEN, Trait.COMPRESSED, Trait.OWN_CLASS):
        plan.refuse("TransformersModel", trait, "use model.generate with an HFCache")
    if model.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise NotSupportedError(f"TransformersModel: {name} computes in {model.dtype}")
    return plan
