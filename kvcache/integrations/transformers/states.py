"""The states of linear attention layers between transformers and the recurrent cache."""

from __future__ import annotations

from collections.abc import Iterable

import torch

import ml
from kvcache import NotSupportedError, OrderError, RecurrentCache
from kvcache.integrations.transformers.rows import Rows, untraced

__all__ = ["States"]


class States:
    """Convolution and recurrent states of the rows' linear layers.

    A decoding step fetches a convolution state and writes into it without saying how many tokens it
    brings. The mask made before says so: a pass begins when a state is fetched after a mask was made.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self._started: set[int] = set()
        self._fetched: set[int] = set()
        """Layers that joined the pass under way by fetching their state."""
        self._due: set[int] = set()
        """Layers that joined it and have not given their recurrent state yet."""
        self._device: torch.device | None = None

    def copy(self, rows: Rows) -> States:
        """The same for rows that are a copy."""
        other = States(rows)
        other._started, other._device = {*self._started}, self._device
        return other

    def begin_anew(self, layers: Iterable[int]) -> None:
        """These layers have states, others none: after the rows were restored or emptied."""
        self._started = {*layers}
        self._fetched.clear()
        self._due.clear()

    @property
    def _cache(self) -> RecurrentCache:
        cache = self.rows.store.family.recurrent
        assert cache is not None
        return cache

    @untraced
    def started(self, layer: int) -> bool:
        """Whether the layer has states."""
        return layer in self._started and self.rows.length > 0

    @untraced
    def conv(self, layer: int) -> torch.Tensor:
        """The convolution states (rows, channels, kernel), as a view."""
        self._fetch(layer)
        return self._alias(self._cache.conv_state(self.rows.store.ctx, layer))

    @untraced
    def recurrent(self, layer: int) -> torch.Tensor:
        """The recurrent states (rows, heads, key_dim, value_dim), as a view."""
        self._fetch(layer)
        return self._alias(self._cache.recurrent_state(self.rows.store.ctx, layer))

    def _fetch(self, layer: int) -> None:
        rows = self.rows
        if rows.seen[layer] != rows.length:
            tokens = rows.current(layer).tokens
        elif rows.expected is not None:
            tokens = rows.expected
        else:
            return
        rows.enter(layer, tokens, len(rows.sequences))
        rows.reached(layer)  # what is fetched may be written from now on
        self._fetched.add(layer)
        self._due.add(layer)

    def _alias(self, state: ml.Tensor) -> torch.Tensor:
        found = self.rows.store.bridge.alias(state)
        if self._device is not None and found.device != self._device:
            raise NotSupportedError(
                f"HFCache: recurrent states on {found.device} of a model on {self._device}, which writes "
                "them in place; open the backend on the model's device"
            )
        return found

    @untraced
    def update_conv(self, layer: int, inputs: torch.Tensor, kernel: int | None) -> torch.Tensor:
        """Take inputs (rows, channels, tokens); returns them behind those before, padded to a kernel."""
        tokens = inputs.shape[-1]
        if layer in self._fetched:
            self._fetched.discard(layer)
        else:
            self.rows.enter(layer, tokens, inputs.shape[0], inputs)
        self._device = inputs.device
        cache, store = self._cache, self.rows.store
        if not cache.conv_shape:
            cache.conv_shape = (inputs.shape[1], kernel or tokens)
        size = cache.conv_shape[-1]
        if self.started(layer):
            state = self._alias(cache.conv_state(store.ctx, layer))
            full = torch.cat((state.to(inputs.dtype), inputs), -1)
        else:
            full = torch.nn.functional.pad(inputs, (max(0, size - tokens), 0))
        cache.set_conv_state(store.ctx, layer, store.bridge.to_backend(store.ctx, full[..., -size:]))
        self.rows.reached(layer)
        self._due.add(layer)
        self._started.add(layer)
        return full

    @untraced
    def update_recurrent(self, layer: int, states: torch.Tensor) -> torch.Tensor:
        rows, cache, store = self.rows, self._cache, self.rows.store
        if layer not in self._due:
            for seq in rows.sequences:  # its convolution state may have been written already
                cache.mark_lost(seq)
            raise OrderError(
                f"HFCache: layer {layer} brings a recurrent state, and no mask has told of how many tokens; "
                "give the model a 2-D attention mask or none. The states are lost: call reset()"
            )
        self._due.discard(layer)
        self._fetched.discard(layer)
        if not cache.state_shape:
            cache.state_shape = tuple(states.shape[1:])
        cache.set_recurrent_state(store.ctx, layer, store.bridge.to_backend(store.ctx, states))
        self._started.add(layer)
        return states
