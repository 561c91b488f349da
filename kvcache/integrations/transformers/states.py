"""The states of linear attention layers between transformers and the recurrent cache."""

from __future__ import annotations

import torch

import ml
from kvcache import NotSupportedError, OrderError, RecurrentCache
from kvcache.integrations.transformers.kinds import CONV
from kvcache.integrations.transformers.passes import ForwardPass
from kvcache.integrations.transformers.rows import BatchRows, untraced
from kvcache.storage.state_slots import Checkpoint

__all__ = ["States"]


class States:
    """Convolution and recurrent states of the rows' linear layers.

    A layer fetches its states first. Of one token it may then write into them and say no more; of several
    it always gives a convolution its inputs, which tell how many. What is fetched first in a pass
    therefore begins one of one token, and such inputs make it longer.
    """

    def __init__(self, rows: BatchRows) -> None:
        self.rows = rows

    @property
    def _cache(self) -> RecurrentCache:
        cache = self.rows.pool.family.recurrent
        assert cache is not None
        return cache

    @untraced
    def started(self, layer: int) -> bool:
        """Whether the layer has states."""
        return self.rows.seen[layer] > 0

    @untraced
    def fetch(self, layer: int, which: str) -> torch.Tensor | None:
        """The "conv" states (rows, channels, kernel) or "recurrent" ones (rows, heads, key_dim, value_dim): a
        view that may be written, of the pass under way or of the next one. None where there are none yet."""
        rows = self.rows
        if not self.started(layer):
            return None
        current = rows.under_way
        if rows.seen[layer] != rows.length:
            current = rows.current(layer)
        elif current is None or (layer, which) in current.states:
            current = rows.enter(layer, 1, len(rows.sequences))
        rows.reached(layer)  # what is fetched may be written from now on
        current.states[layer, which] = True
        if which == "conv":
            return self._conv(layer)
        if not self._cache.state_shape:
            return None
        return self._alias(layer, self._cache.recurrent_state(self._at(layer), layer))

    def _at(self, layer: int) -> ml.Context:
        return self.rows.pool.ctx.layer(layer)

    def _conv(self, layer: int) -> torch.Tensor:
        return self._alias(layer, self._cache.conv_state(self._at(layer), layer))

    def _alias(self, layer: int, state: ml.Tensor) -> torch.Tensor:
        pool = self.rows.pool
        found, device = pool.bridge.alias(state), pool.places.like(layer).device
        if found.device != device:
            raise NotSupportedError(
                f"HFCache: recurrent states of layer {layer} on {found.device} of a model on {device}, which "
                "writes them in place; open the backend on the model's device"
            )
        return found

    @untraced
    def update_conv(self, layer: int, inputs: torch.Tensor, kernel: int | None) -> torch.Tensor:
        """Take inputs (rows, channels, tokens); returns them behind those before, padded to a kernel."""
        rows, tokens, started = self.rows, inputs.shape[-1], self.started(layer)
        begun = rows.under_way
        if begun is not None and self._has_fetched(layer, begun):
            if begun.tokens != tokens:
                rows.lengthen(layer, tokens, inputs.shape[0], inputs)
        else:
            rows.enter(layer, tokens, inputs.shape[0], inputs)
        cache, pool = self._cache, rows.pool
        at = pool.place(layer, inputs)
        if not cache.conv_shape:
            cache.learn_shapes(conv=(inputs.shape[1], kernel or tokens))
        size = cache.conv_shape[-1]
        if started:
            full = torch.cat((self._conv(layer).to(inputs.dtype), inputs), -1)
        else:
            full = torch.nn.functional.pad(inputs, (max(0, size - tokens), 0))
        if pool.plan.layers[layer].name == CONV and rows.settled is not None:
            before = rows.inputs.get(layer, full[..., : full.shape[-1] - tokens])
            rows.inputs[layer] = torch.cat((before, inputs), -1)
        cache.set_conv_state(at, layer, pool.bridge.to_backend(at, full[..., -size:]))
        rows.reached(layer)
        assert rows.under_way is not None
        rows.under_way.states[layer, "conv"] = False
        return full

    def _has_fetched(self, layer: int, begun: ForwardPass) -> bool:
        """Whether ``layer`` has fetched states for what it gives now: no later one has had its turn."""
        fetched = begun.states.get((layer, "conv")) or begun.states.get((layer, "recurrent"))
        return bool(fetched) and self.rows.length not in self.rows.seen[layer + 1 :]

    @untraced
    def update_recurrent(self, layer: int, states: torch.Tensor) -> torch.Tensor:
        rows, cache, pool = self.rows, self._cache, self.rows.pool
        current = rows.under_way
        if (
            current is None
            or rows.seen[layer] != rows.length
            or current.states.get((layer, "recurrent")) is False
        ):
            raise OrderError(
                f"HFCache: layer {layer} brings a recurrent state before it has fetched one or given its "
                "convolution inputs, which tell of how many tokens it is"
            )
        if not cache.state_shape:
            cache.learn_shapes(state=tuple(states.shape[1:]))
        at = pool.place(layer, states)
        cache.set_recurrent_state(at, layer, pool.bridge.to_backend(at, states))
        current.states[layer, "recurrent"] = False
        return states

    def crop(self, length: int) -> None:
        """Keep the first ``length`` tokens of the rows; see ``BatchRows.cut``."""
        self.rows.cut(length, self._marks(length))

    def _marks(self, length: int) -> list[Checkpoint]:
        """The rows' states of ``length``, from the inputs that were recorded; [] where these do not tell."""
        rows = self.rows
        convolving = [i for i, kind in enumerate(rows.pool.plan.layers) if kind.name == CONV]
        if not 0 < length < rows.length or rows.inputs.keys() != {*convolving} or not convolving:
            return []
        cache, bridge = self._cache, rows.pool.bridge
        size = cache.conv_shape[-1]
        if cache.state_shape or length < (rows.settled or 0):
            return []
        found: list[dict[tuple[str, int], ml.Tensor]] = [{} for _ in rows.sequences]
        for layer, past in rows.inputs.items():
            gone = rows.seen[layer] - length
            state = past[..., : past.shape[-1] - gone][..., -size:]
            state = torch.nn.functional.pad(state, (size - state.shape[-1], 0))
            for row, states in enumerate(found):
                states["conv", layer] = bridge.to_backend(self._at(layer), state[row : row + 1].contiguous())
        return [cache.mark_of(length, states) for states in found]
