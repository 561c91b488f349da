"""A model of mlx-lm for the engine: ``Engine(MLXModel(model))``."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

import ml
from kvcache import layers_of_cache
from kvcache.cache import Batch, InvalidRangeError, NotSupportedError
from kvcache.integrations.loaded_folder import LoadedFolder
from kvcache.integrations.mlx_lm.adapters import Adapters
from kvcache.integrations.mlx_lm.calls import parts_matter
from kvcache.integrations.mlx_lm.head import OutputHead
from kvcache.integrations.mlx_lm.layers import Attention, Recurrent, layers_of, wanted_by
from kvcache.integrations.mlx_lm.packed import PackedPass
from kvcache.integrations.mlx_lm.padding import keep_whole_steps
from kvcache.integrations.mlx_lm.pool import called_by, entries_of, layers_tried, prompt_cache_of
from kvcache.integrations.mlx_lm.rows import BatchRows
from kvcache.integrations.mlx_lm.sequences import SequencePool
from kvcache.integrations.mlx_lm.storage import PoolOptions, Storage
from kvcache.integrations.rows.driven import LOOKBACK, DrivenModel, Layout, Sizes, positions_in
from kvcache.stores import Part

__all__ = ["MLXModel"]


_DTYPES = {ml.DType.F32: mx.float32, ml.DType.F16: mx.float16, ml.DType.BF16: mx.bfloat16}


class MLXModel(DrivenModel):
    """A ``LanguageModel``: a model of mlx-lm, as it was loaded, for ``Engine`` and ``ModelDraft``.

    ::

        model, tokenizer, config = mlx_lm.load(folder, return_config=True)
        with Engine(MLXModel(model, config)) as engine:
            answers = engine.complete([[1, 2, 3], [1, 2, 4]])

    ``config`` has the end-of-text ids and position limits of config.json and generation_config.json, of which
    mlx-lm's models keep only a part; without it, only ``GenerationOptions`` ends an answer. ``backend`` is an
    open MLX backend (None: a new one).

    The constructor computes a few tokens of two sequences in several passes, and once more with mlx-lm's own
    prompt cache in one pass. If the logits differ in every ``layout``, it raises NotSupportedError. The model
    still works on its own and with other prompt caches. Its weights and adapters may change while no request
    is running: cached tokens are reused only by requests with the same adapters, as in MLXPrefixCache.
    """

    def __init__(
        self, model: Any, config: Mapping[str, Any] | None = None, backend: ml.Backend | None = None
    ) -> None:
        if not (callable(model) and hasattr(model, "parameters")):
            raise InvalidRangeError(
                f"MLXModel: model is a {type(model).__name__}; it must be the first of what mlx_lm.load "
                "returns"
            )
        name = type(model).__module__.rpartition(".")[2]
        if parts_matter(model):
            raise NotSupportedError(
                f"MLXModel: {name} gives other tokens where a prompt is evaluated in other parts"
            )
        asked = layers_of(model)
        mx.eval(model.parameters())  # now, not in the thread of the first request
        self._adapters = Adapters(model)
        self.model, self._config = model, dict(config or {})
        self._folder: LoadedFolder | None = None
        self.backend = ml.open_backend("mlx") if backend is None else backend
        self._shared_stream = getattr(self.backend, "shared_stream", contextlib.nullcontext)
        keep_whole_steps()
        self._layers, self._one_length = layers_tried(model, asked, self.backend)
        new = self._storage()
        called_by(model, new)
        self.dtype = new.computed
        self._last: Any = None
        self._storage_of_last = new
        self._sequences = SequencePool(new, 0, None)
        self._head = OutputHead(model, lambda: self.without((1, 2)))
        self.config = self.settled(self._ways(), name, "call the model with a CachePool")
        self._last = None

    @classmethod
    def load(cls, folder: str | os.PathLike[str], backend: ml.Backend, dtype: ml.DType) -> MLXModel:
        """The model in a folder, converted to ``dtype``, on an MLX ``backend``; quantized weights stay
        quantized.
        """
        loaded = LoadedFolder(folder)
        made, config = load_model(Path(folder))
        made.set_dtype(_DTYPES[dtype])
        model = cls(made, config, backend)
        model._folder = loaded
        return model

    def __repr__(self) -> str:
        return f"<MLXModel: {type(self.model).__module__}, one call of it has {self.layout.value}>"

    def make_cache(self) -> Any:
        """A cache for the model's layers, not yet bound by ``init``."""
        return self._storage().cache

    def _storage(self, cache: Any = None) -> Storage:
        """The storage of the layers in a cache made by ``make_cache``; None: in a new cache."""
        ctx = self.backend.new_context()
        options = PoolOptions(rollback=LOOKBACK, checkpoints=24)
        return Storage(self._layers, ctx, options, self._one_length, cache)

    def variant(self) -> Part:
        """Identifies adapters and changes of the weights since construction."""
        return self._adapters.variant()

    def identity(self) -> dict[str, str]:
        """The identity of weights, config and dtype for stores, in JSON values; reads all weights once.

        For a model from ``load`` this is ``kvcache.stores.identity_of`` of its folder, which other runtimes
        share if they compute the same keys and values from it. Otherwise the log says why not, and only
        processes with mlx-lm share it.
        """
        if self._folder is not None:
            rotation = {name: self._args.get(name) for name in ("rope_theta", "rope_scaling")}
            if (shared := self._folder.identity(self.dtype, "mlx-lm", rotation)) is not None:
                return shared
        total = hashlib.sha256()
        args = {**self._args, "text_config": _named(self._args.get("text_config"))}
        total.update(json.dumps(args, sort_keys=True, default=str).encode())
        named_arrays: Any = tree_flatten(self.model.parameters())
        for name, array in sorted(named_arrays, key=lambda named: str(named[0])):
            total.update(f"{name} {array.dtype} {array.shape}".encode())
            if array.size:
                total.update(np.array(array.reshape(-1).view(mx.uint8)).data)
        return {"mlx_lm": total.hexdigest(), "dtype": self.dtype.name}

    @property
    def _args(self) -> dict[str, Any]:
        return _named(getattr(self.model, "args", getattr(self.model, "config", None)))

    def call(
        self, ctx: ml.Context, cache: Any, ids: Any, positions: np.ndarray, sequences: np.ndarray,
        outputs: np.ndarray,
    ) -> ml.Tensor:  # fmt: skip
        """Logits F32 (outputs, vocabulary) of one call of the model, which is one pass of the cache."""
        storage = self._storage_for(cache)
        storage.ctx = ctx
        tokens = ids.native if hasattr(ids, "native") else mx.array(ids.astype(np.int32))
        if self.layout is Layout.PACKED:  # each token is a row
            cache.start_forward(ctx, Batch(positions.tolist(), sequences.tolist()))
            one = PackedPass(storage, ctx, mx.array(positions.astype(np.int32)))
            choose, places = _rows(outputs, len(tokens)), np.arange(len(outputs))
            with self._shared_stream():  # the pass has begun: nothing waits for another thread from here on
                entries = entries_of(storage, one.entry)
                return self._logits(ctx, tokens[:, None], entries, choose, places, outputs)
        starts = np.flatnonzero(np.diff(sequences, prepend=-1))
        rows, pool = len(starts), self._sequences
        pool.current = None
        lent = [pool.lent(int(seq)) for seq in sequences[starts]]
        entries = prompt_cache_of(
            storage, BatchRows(pool, lent, positions[starts].tolist(), batched=rows > 1)
        )
        choose, places = _last(outputs, len(tokens) // rows)
        logits = self._logits(ctx, tokens.reshape(rows, -1), entries, choose, places, outputs)
        pool.undo_unwritten()
        return logits

    def _logits(
        self, ctx: ml.Context, tokens: mx.array, entries: list[Any],
        choose: Callable[[mx.array], mx.array], places: np.ndarray, outputs: np.ndarray,
    ) -> ml.Tensor:  # fmt: skip
        """Logits F32 of ``outputs``, which are at ``places`` of those that ``choose`` leaves."""
        with self._head.only(choose) as chosen:
            logits = self.model(tokens, cache=entries)
        flat = logits.reshape(-1, logits.shape[-1])[mx.array(places if chosen else outputs, mx.int32)]
        return ctx.input().from_native(flat.astype(mx.float32))

    def _storage_for(self, cache: Any) -> Storage:
        if self._last is not cache:
            self._storage_of_last, self._last = self._storage(cache), cache
            called_by(self.model, self._storage_of_last)
            self._sequences = SequencePool(self._storage_of_last, 0, None)
            self._sequences.give_away()
        return self._storage_of_last

    # Choosing a layout.

    def _ways(self) -> Iterator[None]:
        """The possible layouts, fastest first."""
        path = self._head.path
        for self.layout in Layout:
            for self._head.path in dict.fromkeys((path, None)):
                yield

    def without(self, text: Sequence[int]) -> np.ndarray:
        """Logits (tokens, vocabulary) of a text in one pass with mlx-lm's own prompt cache."""
        logits = self.model(mx.array([list(text)], mx.int32), cache=wanted_by(self.model))
        return np.array(logits[0].astype(mx.float32))

    def sizes(self, cache: Any, vocabulary: int) -> Sizes:
        """The sizes from the layers' storage, the config and the model."""
        storage = self._storage_for(cache)
        windows = {
            i: layer.window + LOOKBACK
            for i, layer in enumerate(storage.layers)
            if isinstance(layer, Attention) and layer.used and layer.window is not None
        }
        states = sum(
            math.prod(shape) * int(dtype.size)
            for layer in storage.layers
            if isinstance(layer, Recurrent)
            for shape, dtype in zip(layer.shapes, layer.dtypes, strict=True)
        )
        settings: dict[str, Any] = {}
        for config in (self._args, self._config):
            settings |= {**config, **_named(config.get("text_config"))}
        eos = settings.get("eos_token_id")
        most = positions_in(SimpleNamespace(**settings))
        return Sizes(
            vocab_size=vocabulary,
            max_positions=int(min(most, storage.longest)),
            eos_ids=tuple([eos] if isinstance(eos, int) else eos or ()),
            cached_layers=dict(layers_of_cache(cache)),
            windows=windows,
            states=states,
        )


def _rows(outputs: np.ndarray, tokens: int) -> Callable[[mx.array], mx.array]:
    """How to choose hidden states (tokens, 1, dim)."""
    chosen = mx.array(outputs, mx.int32)

    def choose(hidden: mx.array) -> mx.array:
        if hidden.shape[0] != tokens:  # MLX does not check indices
            raise NotSupportedError(f"the output projection has {hidden.shape[0]} of {tokens} tokens")
        return hidden[chosen]

    return choose


def _last(outputs: np.ndarray, length: int) -> tuple[Callable[[mx.array], mx.array], np.ndarray]:
    """How to choose the last hidden states of each row, so that ``outputs``, counted row by row, are among
    them, and their places then. A model with one offset for all rows is called with each row alone.
    """
    row, token = np.divmod(outputs, length)
    count = length - int(token.min(initial=length - 1))
    return lambda hidden: hidden[..., -count:, :], row * count + token - (length - count)


def _named(config: Any) -> dict[str, Any]:
    """The items of a mapping or the attributes of an object; empty for None."""
    return dict(config) if isinstance(config, Mapping) else {} if config is None else dict(vars(config))
