"""Caches for hybrid models: a StateCache beside a CausalCache, in one wrapper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import ml
from kvcache.cache import ShiftFunction
from kvcache.caches.causal import CausalCache
from kvcache.caches.states import StateCache
from kvcache.caches.wrapper import WrapperCache
from kvcache.storage.state_specs import StateSpec


class RecurrentCache(WrapperCache):
    """The caches of a hybrid model: ``attention`` for its layers with K and V, ``states`` for the others.

    A wrapper of these two that also has the calls of StateCache: calls on sequences apply to both, and a
    sequence can go back only as far as its states can. A layer may use both. Combine states with other kinds
    of attention in the same way: ``WrapperCache(SlidingWindowCache(window), StateCache(states))``.

    ``conv_shape`` and ``state_shape`` declare two states for all layers, which ``conv_state`` and
    ``recurrent_state`` return: "conv", for example (channels, kernel - 1), of dtype ``conv_dtype``, and
    "recurrent", for example (heads, key_dim, value_dim), always F32. ``checkpoints``, ``checkpoint_interval``
    and ``conv_dtype`` (there ``dtype``) are options of StateCache, ``shift`` is that of CausalCache. For
    other states and options, make the two caches yourself and combine them with ``of``.

    >>> import ml
    >>> from kvcache import Batch, RecurrentCache
    >>> cache = RecurrentCache(conv_shape=(6, 3), state_shape=(2, 4, 4))
    >>> with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
    ...     cache.init(backend, ml.DType.F32, max_sequences=1, capacity=16, max_batch=4)
    ...     cache.start_forward(ctx, Batch([0, 1], [0, 0]))
    ...     cache.set_layer(0)                                   # a recurrent layer
    ...     cache.set_conv_state(ctx, 0, cache.conv_state(ctx, 0))
    ...     cache.set_recurrent_state(ctx, 0, cache.recurrent_state(ctx, 0))
    ...     cache.set_layer(1)                                   # a layer with attention
    ...     cache.put(ctx, ctx.zeros((2, 1, 4), ml.DType.F32), ctx.zeros((2, 1, 4), ml.DType.F32))
    ...     print(cache.offset(0), cache.computed(0))
    ...     cache.close()
    2 2
    """

    def __init__(
        self,
        conv_shape: tuple[int, ...] = (),
        state_shape: tuple[int, ...] = (),
        shift: ShiftFunction | None = None,
        checkpoints: int = 24,
        checkpoint_interval: int = 256,
        conv_dtype: ml.DType | None = None,
    ) -> None:
        two = {"conv": (conv_shape, None), "recurrent": (state_shape, ml.DType.F32)}
        of_all = {name: StateSpec(shape, dtype) for name, (shape, dtype) in two.items() if shape}
        states = StateCache({None: of_all}, checkpoints, checkpoint_interval, conv_dtype)
        self._join(states, CausalCache(shift))

    @classmethod
    def of(cls, states: StateCache, attention: CausalCache | None = None) -> Self:
        """Combine a cache of states and one of attention (None: a CausalCache()), neither of them
        initialized.
        """
        made = cls.__new__(cls)
        made._join(states, CausalCache() if attention is None else attention)
        return made

    def _join(self, states: StateCache, attention: CausalCache) -> None:
        self.attention, self.states = attention, states
        """The cache of the layers with attention, and the cache of the layers with states."""
        super().__init__(attention, states)

    def set_layer_type(self, i: int) -> None:
        """No effect: a layer may use both caches, and K and V always go to ``attention``."""
        super().set_layer_type(i)
        self._type = 0

    # The calls of StateCache.

    def conv_state(self, ctx: ml.Context, layer: int) -> ml.Tensor:
        return self.states.conv_state(ctx, layer)

    def set_conv_state(self, ctx: ml.Context, layer: int, t: ml.Tensor) -> None:
        self.states.set_conv_state(ctx, layer, t)

    def recurrent_state(self, ctx: ml.Context, layer: int) -> ml.Tensor:
        return self.states.recurrent_state(ctx, layer)

    def set_recurrent_state(self, ctx: ml.Context, layer: int, t: ml.Tensor) -> None:
        self.states.set_recurrent_state(ctx, layer, t)

    @property
    def delivers(self) -> bool:
        return self.states.delivers

    @property
    def sequences(self) -> tuple[int, ...]:
        return self.states.sequences

    def state(self, ctx: ml.Context, name: str, layer: int | None = None) -> ml.Tensor:
        return self.states.state(ctx, name, layer)

    def update_state(self, ctx: ml.Context, name: str, t: ml.Tensor, layer: int | None = None) -> None:
        self.states.update_state(ctx, name, t, layer)

    def want_states(self, seq: int, positions: Iterable[int]) -> None:
        self.states.want_states(seq, positions)

    def wanted_states(self) -> Mapping[int, tuple[int, ...]]:
        return self.states.wanted_states()

    def deliver_states(
        self,
        ctx: ml.Context,
        name: str,
        t: ml.Tensor,
        at: Sequence[tuple[int, int]],
        layer: int | None = None,
    ) -> None:
        self.states.deliver_states(ctx, name, t, at, layer)

    def learn_state(self, name: str, spec: StateSpec, layer: int | None = None) -> None:
        self.states.learn_state(name, spec, layer)

    def state_spec(self, name: str, layer: int) -> StateSpec | None:
        return self.states.state_spec(name, layer)

    def checkpoints(self, seq: int) -> tuple[int, ...]:
        return self.states.checkpoints(seq)

    def checkpoint(self, seq: int) -> None:
        self.states.checkpoint(seq)
