"""The states of linear attention layers between transformers and the cache of states."""

from __future__ import annotations

import torch

import ml
from kvcache import NotSupportedError, OrderError, Snapshot, StateCache, StateSnapshot, StateSpec
from kvcache.integrations.transformers.bridge import dtype_of
from kvcache.integrations.transformers.passes import ForwardPass
from kvcache.integrations.transformers.rows import BatchRows, untraced

__all__ = ["States", "state_name"]


def state_name(kind: str, i: int) -> str:
    """The name of state ``i`` of a layer in the cache of states."""
    return f"{kind}{i or ''}"


class States:
    """Convolution and recurrent states of the rows' linear layers.

    A layer fetches its states first. For one token, it may then simply write into them; for several, it
    always passes inputs to a convolution, which give the number of tokens. The first fetch of a pass
    therefore begins a one-token pass, and such inputs extend it.
    """

    def __init__(self, rows: BatchRows) -> None:
        self.rows = rows
        self._brought: dict[tuple[int, str], torch.Tensor] = {}
        """Whole states of a pass, until K and V give its number of tokens."""

    @property
    def _cache(self) -> StateCache:
        cache = self.rows.pool.family.states
        assert cache is not None
        return cache

    @untraced
    def started(self, layer: int) -> bool:
        """Whether the layer has states."""
        return self.rows.seen[self._part(layer)] > 0

    def _part(self, layer: int) -> int:
        return self.rows.pool.plan.part(layer)

    @untraced
    def fetch(self, layer: int, which: str) -> torch.Tensor | None:
        """The "conv" states (rows, channels, kernel) or "recurrent" ones (rows, heads, key_dim, value_dim): a
        writable view, of the current pass or of the next one. None if there are none yet."""
        rows, part = self.rows, self._part(layer)
        if not self.started(layer):
            return None
        current = rows.under_way
        if rows.seen[part] != rows.length:
            current = rows.current(part)
        elif current is None or (layer, which) in current.states:
            current = rows.enter(part, 1, len(rows.sequences))
        rows.reached(part)  # the fetched view may be written from now on
        current.states[layer, which] = True
        if self._cache.state_spec(which, layer) is None:
            return None
        return self._state(layer, which)

    def _at(self, layer: int) -> ml.Context:
        return self.rows.pool.ctx.layer(layer)

    def _state(self, layer: int, which: str) -> torch.Tensor:
        pool = self.rows.pool
        state = pool.bridge.alias(self._cache.state(self._at(layer), which, layer))
        device = pool.places.like(layer).device
        if state.device != device:
            raise NotSupportedError(
                f"HFCache: recurrent states of layer {layer} on {state.device} for a model on {device}, "
                "which writes them in place; open the backend on the model's device"
            )
        return state

    @untraced
    def update_conv(self, layer: int, inputs: torch.Tensor, kernel: int | None, i: int = 0) -> torch.Tensor:
        """Store inputs (rows, channels, tokens) of the layer's convolution ``i``; returns them after the
        previous ones, padded to a kernel.
        """
        rows, tokens, part, which = self.rows, inputs.shape[-1], self._part(layer), state_name("conv", i)
        begun = rows.under_way
        joins = begun is not None and self._joins(layer, which, begun)
        started = begun.begin > 0 if begun is not None and joins else self.started(layer)
        if begun is not None and joins:
            if begun.tokens != tokens:
                rows.lengthen([part], tokens)
                rows.enter(part, tokens, inputs.shape[0], inputs)
        else:
            rows.enter(part, tokens, inputs.shape[0], inputs)
        cache, pool = self._cache, rows.pool
        at = pool.place(layer, inputs)
        cache.learn_state(which, StateSpec((inputs.shape[1], kernel or tokens)), layer)
        spec = cache.state_spec(which, layer)
        assert spec is not None
        size = spec.shape[-1]
        if started:
            full = torch.cat((self._state(layer, which).to(inputs.dtype), inputs), -1)
        else:
            full = torch.nn.functional.pad(inputs, (max(0, size - tokens), 0))
        if rows.settled is not None:
            before = rows.inputs.get((layer, which), full[..., : full.shape[-1] - tokens])
            rows.inputs[layer, which] = torch.cat((before, inputs), -1)
        cache.update_state(at, which, pool.bridge.to_backend(at, full[..., -size:]), layer)
        rows.reached(part)
        assert rows.under_way is not None
        rows.under_way.states[layer, which] = False
        return full

    def _joins(self, layer: int, which: str, begun: ForwardPass) -> bool:
        """Whether a state stored by ``layer`` belongs to its current pass: no later layer has taken part, and
        it has fetched or stored another state in that pass.
        """
        own = {name: fetched for (i, name), fetched in begun.states.items() if i == layer}
        same = any(own.values()) or (bool(own) and which not in own)
        return same and not self.rows.begun_later(layer)

    @untraced
    def update_recurrent(self, layer: int, states: torch.Tensor, i: int = 0) -> torch.Tensor:
        rows, cache, pool, which = self.rows, self._cache, self.rows.pool, state_name("recurrent", i)
        current = rows.under_way
        if (
            current is None
            or rows.seen[self._part(layer)] != rows.length
            or current.states.get((layer, which)) is False
        ):
            raise OrderError(
                f"HFCache: layer {layer} stores a recurrent state before it has fetched one or stored "
                "convolution inputs, which give the number of tokens"
            )
        cache.learn_state(which, StateSpec(tuple(states.shape[1:]), ml.DType.F32), layer)
        at = pool.place(layer, states)
        cache.update_state(at, which, pool.bridge.to_backend(at, states), layer)
        current.states[layer, which] = False
        return states

    @untraced
    def bring(self, layer: int, which: str, states: torch.Tensor) -> torch.Tensor:
        """Store the new states of the current pass, whose number of tokens may not be known yet."""
        self._brought[layer, which] = states
        if self.rows.under_way is not None and self.rows.length in self._attended:
            self._write_brought(self.rows.under_way.tokens)
        return states

    @property
    def _attended(self) -> set[int]:
        """The number of tokens that layers with K and V have, which includes the current pass."""
        seen = zip(self.rows.seen, self.rows.pool.plan.layers, strict=False)
        return {count for count, kind in seen if kind.attends and count}

    @untraced
    def settle(self, key: torch.Tensor) -> None:
        """Settle the number of tokens of states stored before the keys (rows, heads, tokens, dim) arrived."""
        rows = self.rows
        if not self._brought:
            return
        begun = rows.under_way
        if begun is not None and rows.length not in self._attended:
            rows.lengthen({self._part(i) for i, _ in begun.states}, key.shape[2])
        self._write_brought(key.shape[2], key)

    def _write_brought(self, tokens: int, like: torch.Tensor | None = None) -> None:
        rows, pool = self.rows, self.rows.pool
        brought, self._brought = self._brought, {}
        for (layer, which), states in brought.items():
            part = self._part(layer)
            current = rows.under_way
            inside = current is not None and rows.seen[part] == rows.length
            if current is None or not inside or all(i != layer for i, _ in current.states):
                current = rows.enter(part, tokens, states.shape[0], like)
            rows.reached(part)
            at = pool.place(layer, states)
            self._cache.learn_state(which, StateSpec(tuple(states.shape[1:]), dtype_of(states.dtype)), layer)
            self._cache.update_state(at, which, pool.bridge.to_backend(at, states), layer)
            current.states[layer, which] = False

    def crop(self, length: int) -> None:
        """Keep the first ``length`` tokens of the rows; see ``BatchRows.cut``."""
        self.rows.cut(length, self._marks(length))

    def _marks(self, length: int) -> list[dict[int, Snapshot]]:
        """The rows' states at ``length``, from recorded inputs, for ``cut``; [] if these do not suffice."""
        rows, plan = self.rows, self.rows.pool.plan
        layers = [i for i, count in enumerate(plan.states) if count]
        if not layers or not all(map(self.convolves, layers)):
            return []
        if not max(1, rows.settled or 0) <= length < rows.length:
            return []
        if rows.inputs.keys() != {(i, state_name("conv", n)) for i in layers for n in range(plan.states[i])}:
            return []
        cache, bridge = self._cache, rows.pool.bridge
        marks: list[dict[tuple[str, int], ml.Tensor]] = [{} for _ in rows.sequences]
        for (layer, which), past in rows.inputs.items():
            gone, spec = rows.seen[self._part(layer)] - length, cache.state_spec(which, layer)
            assert spec is not None
            size = spec.shape[-1]
            state = past[..., : past.shape[-1] - gone][..., -size:]
            state = torch.nn.functional.pad(state, (size - state.shape[-1], 0))
            for row, states in enumerate(marks):
                states[which, layer] = bridge.to_backend(self._at(layer), state[row : row + 1].contiguous())
        number = rows.pool.family.tops.index(cache)
        return [{number: StateSnapshot(length, length, states)} for states in marks]

    def convolves(self, layer: int) -> bool:
        """Whether a layer has only convolution states, which can be recomputed from their inputs."""
        if not self.rows.pool.bound:
            return False
        cache = self._cache
        return cache.state_spec("conv", layer) is not None and cache.state_spec("recurrent", layer) is None
