"""HFCache: these caches as a cache of transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Self, cast

import torch
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import EncoderDecoderCache
from transformers.generation.utils import ALL_CACHE_NAMES, GenerationMixin
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from kvcache import InvalidRangeError, NotSupportedError
from kvcache.cache import check_whole
from kvcache.integrations.conversations import show_options
from kvcache.integrations.rows.caches import ModelCaches
from kvcache.integrations.transformers.arguments import (
    CacheOptions,
    check_names,
    check_options,
    check_type,
)
from kvcache.integrations.transformers.compressors import CompressedLayer
from kvcache.integrations.transformers.indexers import IndexedLayer
from kvcache.integrations.transformers.kinds import CROSS, Kind, empty_layer, layer_plan
from kvcache.integrations.transformers.layers import (
    AttentionLayer,
    CrossCache,
    Crossing,
    CrossLayer,
    HybridLayer,
    LinearLayer,
    RowsCache,
    each_layer,
)
from kvcache.integrations.transformers.masks import check_width
from kvcache.integrations.transformers.places import layer_devices
from kvcache.integrations.transformers.pool import CachePool
from kvcache.integrations.transformers.rows import BatchRows
from kvcache.integrations.transformers.saving import HFSnapshot, like_of, load, save
from kvcache.integrations.transformers.states import States
from kvcache.stores import SnapshotStore, get_snapshot

__all__ = ["HFCache", "HFEncoderDecoderCache", "cache_argument", "generating"]


def generating(model: Any) -> Any:
    """The model whose own ``generate`` runs, inside wrappers of PEFT and torch.compile."""
    parts: Iterable[Any] = getattr(model, "modules", list)()  # empty for anything but a module
    return next((part for part in parts if isinstance(part, GenerationMixin)), model)


def cache_argument(model: Any) -> str:
    """The name of the argument in which ``generate`` passes a model its cache: ``cache`` from transformers
    5.24 on.
    """
    if ALL_CACHE_NAMES[0] == "cache":
        return "cache"
    return "cache_params" if "mamba" in type(generating(model)).__name__.lower() else "past_key_values"


class HFCache(RowsCache):
    """A cache for ``model(..., cache=cache)`` and ``model.generate(..., cache=cache)``.

    Before transformers 5.24 the argument is called ``past_key_values``.

    The rows of the batch are sequences of our caches: a causal one for full attention, a window for
    sliding attention, chunks for chunked attention, a recurrent cache for linear attention.
    Gradients do not flow through it.
    """

    def __new__(cls, config: Any = None, *args: Any, **options: Any) -> Self:
        """For configs of encoder-decoders and of MiniMax, makes the subclass that these models require."""
        check_names("HFCache", [field.name for field in fields(CacheOptions)], args, options)
        if cls is HFCache and getattr(config, "is_encoder_decoder", False):
            return cast("Self", super().__new__(HFEncoderDecoderCache))
        if cls is HFCache and getattr(config, "model_type", None) == "minimax":
            return cast("Self", super().__new__(HFMiniMaxCache))
        return cast("Self", super().__new__(cls))

    def __init__(self, config: Any, **options: Any) -> None:
        """A cache for models of ``config``, with the options of ``CacheOptions``. Nothing is allocated before
        the first keys arrive.

        Raises NotSupportedError for a config with unsupported layers.
        """
        chosen = CacheOptions(**options)
        check_options("HFCache", chosen)
        plan = layer_plan(config)
        if isinstance(self, EncoderDecoderCache):  # also for a decoder used with another model's encoder
            plan = replace(plan, encoder=True)
        self._attach(BatchRows(CachePool(plan, chosen)))

    def __repr__(self) -> str:
        if not self.rows.pool.bound:
            return f"<HFCache, layers: {len(self.layers)}; nothing stored yet>"
        rows = f"rows: {len(self.rows.sequences)}, tokens of each: {self.rows.length}"
        return f"<HFCache, layers: {len(self.layers)}, {rows}; in {self.rows.pool.family.all!r}>"

    def bind(self, like: torch.Tensor) -> ModelCaches:
        """Create the caches now, for keys with the dtype and on the device of ``like``."""
        self.rows.pool.bind(1, like)
        return self.rows.pool.family

    def detach(self) -> None:
        """Release the rows unchanged, since they have a new owner."""
        self.rows.become([])
        self.rows.clear()

    def _attach(self, rows: BatchRows) -> None:
        self.rows, self._states = rows, States(rows)
        TransformersCache.__init__(
            self, layers=[self._layer(i, kind) for i, kind in enumerate(rows.pool.plan.layers)]
        )

    def _layer(self, i: int, kind: Kind) -> Any:
        if kind.name == CROSS:
            return CrossLayer(self.rows, i)
        plan = self.rows.pool.plan
        if i in plan.compressed:
            return CompressedLayer(self.rows, i, kind, plan.compressed[i])
        if i in plan.indexed:
            return IndexedLayer(self.rows, i, kind)
        if count := plan.states[i]:
            layer = HybridLayer if kind.attends else LinearLayer
            return layer(self._states, i, kind, count)
        return AttentionLayer(self.rows, i, kind) if kind.attends else empty_layer()

    # transformers' interface of a cache, beyond its layers.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of tokens of a layer; for layers that do not count them, that of the rows."""
        if layer_idx >= len(self.layers):
            return 0
        layer = self.layers[layer_idx]
        return layer.get_seq_length() if isinstance(layer, AttentionLayer) else self.rows.length

    @property
    def is_initialized(self) -> bool:
        return self.rows.length > 0

    __iter__ = each_layer

    @property
    def is_compileable(self) -> bool:
        """Whether transformers makes a mask for each one-token step, as for a StaticCache. Without a mask,
        PyTorch repeats the shared KV heads, which on a CPU is up to 30 times slower than transformers' own
        path with a mask. On a CPU nothing is compiled because of this.
        """
        pool = self.rows.pool
        plan = pool.plan
        scaled = plan.grouped and plan.config._attn_implementation == "sdpa"
        return pool.bound and scaled and pool.like.device.type == "cpu"

    def check_mask(self, mask: torch.Tensor, tokens: int, recurrent: bool) -> None:
        if self.rows.removed:  # otherwise the model counts: Git counts an image in each pass
            check_width(mask, self.rows.length, tokens)
        super().check_mask(mask, tokens, recurrent)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replace row i by the previous row ``beam_idx[i]``. Beams share the cells of their common tokens."""
        self.rows.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times, side by side; nothing is copied."""
        self.rows.select([row for row in range(len(self.rows.sequences)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor | Sequence[int]) -> None:
        """Keep these rows: a tensor or a sequence of indices, or a boolean mask."""
        selected, rows = torch.as_tensor(indices), len(self.rows.sequences)
        whole = selected.ndim == 1 and not (selected.numel() and selected.is_floating_point())
        check_type("batch_select_indices", "indices", indices, "whole numbers, or a boolean mask", whole)
        if selected.dtype is torch.bool:
            if rows and len(selected) != rows:
                raise InvalidRangeError(f"batch_select_indices: a mask of {len(selected)} for {rows} rows")
            selected = selected.nonzero().flatten()
        self.rows.select(selected.tolist())

    def crop(self, tokens: int) -> None:
        """Remove the last ``-tokens`` tokens (as in transformers), or keep the first ``tokens`` if it is > 0.
        Raises NotSupportedError, and changes nothing, if a layer cannot go back that far: a window that no
        longer has the tokens visible from there (see ``lookback``), or a recurrent state without a
        checkpoint.
        """
        requested: Any = tokens
        count = (
            int(requested) if isinstance(requested, torch.Tensor) and requested.numel() == 1 else requested
        )
        check_type("crop", "tokens", requested, "a whole number", isinstance(count, int))
        self._states.crop(count if count > 0 else self.rows.length + count)

    def rewind(self, length: int) -> int:
        """Go back to ``length`` tokens, or to the nearest possible length before it; returns it.

        Full attention goes back anywhere; windows at most ``lookback`` tokens, and states to their
        checkpoints. With ``interval``, both also go back to where snapshots were kept, in a loaded cache too.
        Compute the tokens from the returned length on again. Also undoes a pass that failed.
        """
        length = check_whole("rewind", "length", length)
        return self.rows.rewind(length)

    def reset(self) -> None:
        """Remove all rows. Buffers stay allocated; the next batch may have a different size."""
        self.rows.clear()

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        raise NotSupportedError("HFCache: open the backend on the host instead: backend='numpy'")

    prefetch = offload

    # Beyond transformers' caches.

    def remove(self, begin: int, end: int) -> None:
        """Remove positions ``[begin, end)`` of every row; later tokens move down, and their keys are
        re-encoded. Positions count the columns of the batch, including padding. Raises NotSupportedError
        without ``shift``, or if a later token is shared with a fork.
        """
        self.rows.remove(begin, end)

    def fork(self) -> Self:
        """An independent cache with the same content. It shares all current cells; later tokens are separate.
        It uses one of ``max_sequences`` for each row, until it is reset.
        """
        return self.of(self.rows.fork())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A cache with separate buffers and the same content; ``fork`` does this without copying."""
        pool, options = self.rows.pool, self.rows.pool.options
        options = replace(options, capacity=max(options.capacity, self.rows.length))  # rows may share cells
        memo[id(self)] = copy = self.of(BatchRows(CachePool(pool.plan, options)))
        if self.rows.length:
            copy.restore(self.snapshot())
        return copy

    def checkpoint(self) -> None:
        """Keep the current recurrent states, so that ``crop`` can return to this length."""
        recurrent = self.rows.pool.family.states if self.rows.pool.bound else None
        for seq in self.rows.sequences if recurrent is not None else ():
            assert recurrent is not None
            recurrent.checkpoint(seq)

    def snapshot(self) -> HFSnapshot:
        """The content of the cache, for ``restore``. K and V are copied only when necessary."""
        return self.rows.snapshot()

    def restore(self, snapshot: HFSnapshot) -> None:
        """Replace the content by a snapshot of this cache, or of another one for the same model. If that
        fails, raises CacheFullError or InvalidRangeError and changes nothing.
        """
        check_type("restore", "snapshot", snapshot, "what snapshot() gave", isinstance(snapshot, HFSnapshot))
        self._check_layers("restore", snapshot.layers)
        self.rows.restore(snapshot)

    def _check_layers(self, op: str, layers: int) -> None:
        own = len(self.rows.pool.plan.layers)
        if layers != own:
            raise InvalidRangeError(f"{op}: a snapshot of {layers} layers; the model of this cache has {own}")

    def save(self, store: SnapshotStore, key: str, inside: int | None = None) -> bool:
        """Save the content in a store (``kvcache.stores``) under an unused key. If the key is in use, returns
        False and writes nothing; ``store.delete(key)`` frees it.

        With ``interval``, and of a conversation of an HFPrefixCache, the snapshots of windows and states
        inside are saved too, so that ``rewind`` can go back to them after ``load``. They take at most
        ``inside`` bytes (None: as many as everything else); those with the closest neighbours are left out.
        """
        _check_store("save", store)
        if inside is not None:
            check_whole("save", "inside", inside)
        snapshot = self.rows.snapshot_to_save(inside)
        return save(store, key, self.rows.pool.backend, snapshot)

    def load(
        self,
        store: SnapshotStore,
        key: str,
        device: torch.device | str = "cpu",
        device_map: Mapping[str, Any] | None = None,
    ) -> bool:
        """Load what ``save`` stored; ``device`` is the model's. If the key does not exist, returns False and
        changes nothing. The weights are not compared: use different keys for different models. Raises
        InvalidRangeError for a model with another number of layers; other heads are refused by the next pass.

        ``device_map`` is the ``hf_device_map`` of a model that is split over devices. Without it, everything
        is on ``device`` until the layers have put keys from their own devices.
        """
        _check_store("load", store)
        snapshot = get_snapshot(store, key)
        if snapshot is None:
            return False
        self._check_layers("load", snapshot.meta.get("layers", len(self.rows.pool.plan.layers)))
        pool, like = self.rows.pool, like_of(snapshot, torch.device(device))
        with pool.bound_to(len(snapshot.meta["rows"]), like):
            pool.know(layer_devices(device_map or {}))
            self.restore(load(snapshot, pool.backend, torch.device(device), len(pool.plan.layers)))
        return True

    def reserve(self, capacity: int) -> None:
        """Make room for ``capacity`` tokens per row, if there is less; the content is copied once."""
        self.rows.pool.reserve(capacity)


show_options(HFCache, "config", CacheOptions)


def _check_store(op: str, store: object) -> None:
    wanted = "an open store: kvcache.stores.open_store(path or URL)"
    check_type(op, "store", store, wanted, hasattr(store, "get_into"))


class HFEncoderDecoderCache(Crossing, HFCache, EncoderDecoderCache):  # type: ignore[misc]
    """HFCache for encoder-decoders; ``HFCache(config)`` returns one for such a config.

    Cross attention reads an EncoderCache with the decoder's sequences.
    """

    def _attach(self, rows: BatchRows) -> None:
        self.rows, self._states = rows, States(rows)
        cross = CrossCache([CrossLayer(rows, i) for i in rows.pool.plan.crossing])
        EncoderDecoderCache.__init__(self, HFCache.of(rows), cross)
        self._note()

    __iter__ = EncoderDecoderCache.__iter__

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self.self_attention_cache.get_seq_length(layer_idx))

    def crop(self, tokens: int) -> None:
        """As in HFCache. The encoder's output is removed when no token is left."""
        super().crop(tokens)
        self._note()

    def rewind(self, length: int) -> int:
        reached = super().rewind(length)
        self._note()
        return reached

    def reset(self) -> None:
        super().reset()
        self._note()

    def restore(self, snapshot: HFSnapshot) -> None:
        super().restore(snapshot)
        self._note()

    def _note(self) -> None:
        """Record which layers have the encoder's output, which is removed with the tokens of its pass."""
        self.is_updated = {
            i: layer.is_initialized for i, layer in enumerate(self.cross_attention_cache.layers)
        }


class HFMiniMaxCache(HFCache, MiniMaxCache):  # type: ignore[misc]
    """HFCache for MiniMax, which accepts only its own class of cache; ``HFCache(config)`` returns one."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._states.settle(key_states)
        pair: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, layer_idx)
        return pair

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """The current sums of keys times values (rows, heads, head_dim, head_dim); None before the first."""
        return self._states.fetch(layer_idx, "recurrent")

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        self._states.bring(layer_idx, "recurrent", linear_cache)

    def __len__(self) -> int:
        return len(self.layers)
