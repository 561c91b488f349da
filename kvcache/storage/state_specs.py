"""The states that the layers of a cache keep: their names, shapes and dtypes, declared or taken from first
use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

import ml
from kvcache.cache import InvalidRangeError, OrderError, check_whole

_LONGEST_NAME = 64

Declared = Mapping[int | None, Mapping[str, "StateSpec"]]


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A state of fixed size: its shape for one sequence, and its dtype.

    ``dtype`` None: that of the model's activations, which is the ``dtype`` of StateCache.

    >>> from kvcache import StateSpec
    >>> StateSpec((64, 3)).shape                     # 64 channels, the last 3 inputs of a convolution
    (64, 3)
    """

    shape: tuple[int, ...]
    dtype: ml.DType | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        sizes: tuple[object, ...] = self.shape
        for size in sizes:
            if not isinstance(size, (int, np.integer)) or size < 1:
                raise InvalidRangeError(
                    f"StateSpec: shape {self.shape}: size={size!r}; it must be a whole number of at least 1"
                )
        dtype: object = self.dtype
        if dtype is not None and (not isinstance(dtype, ml.DType) or dtype.is_quantized):
            raise ml.DTypeError(
                f"StateSpec: dtype={dtype!r:.40}; it must be an ml.DType that tensors can have"
            )


def is_state_name(name: object) -> bool:
    """Whether a state may have this name; also checked for snapshots from elsewhere."""
    return isinstance(name, str) and len(name) <= _LONGEST_NAME and name.isidentifier()


class StateSpecs:
    """The states of a cache by name and layer.

    ``declared`` lists the states of each layer; those under None apply to every other layer. An undeclared
    state becomes known when it is first stored.
    """

    def __init__(self, declared: Declared) -> None:
        self.declared = {layer: dict(states) for layer, states in declared.items()}
        self._used: dict[tuple[str, int], StateSpec] = {}
        """All states that have been read or stored, with their dtypes."""
        self._activations = ml.DType.F32
        layers: list[object] = [*self.declared]
        for layer in layers:
            if layer is not None and (not isinstance(layer, int) or layer < 0):
                raise InvalidRangeError(f"StateCache: states: layer {layer!r}; layers are numbered from 0")
        for states in self.declared.values():
            for name in states:
                check_state_name("StateCache", name)

    def bind(self, activations: ml.DType) -> None:
        """Forget states known from use; ``activations`` is the dtype of states declared without one."""
        self._used, self._activations = {}, activations

    def default(self, name: str) -> StateSpec | None:
        """The declaration for every layer that is not listed."""
        return self.declared.get(None, {}).get(name)

    @property
    def by_layer(self) -> list[tuple[str, int]]:
        """The name and layer of the states that are declared for a specific layer."""
        layers = self.declared.items()
        return [(name, layer) for layer, states in layers if layer is not None for name in states]

    def declare(self, name: str, spec: StateSpec, layer: int | None) -> None:
        """Declare a state of a layer, or (None) of every layer that is not listed; a known state is not
        changed.
        """
        check_state_name("learn_state", name)
        if layer is None:
            self.declared.setdefault(None, {}).setdefault(name, spec)
        elif self.get(name, layer) is None:
            self._used[name, layer] = StateSpec(spec.shape, self._dtype(spec))

    def get(self, name: str, layer: int) -> StateSpec | None:
        """The specification of a state, with its dtype; None if it is unknown."""
        resolved = self._used.get((name, layer))
        if resolved is None:
            spec = self.declared.get(layer, self.declared.get(None, {})).get(name)
            if spec is not None:
                resolved = self._used[name, layer] = StateSpec(spec.shape, self._dtype(spec))
        return resolved

    def fitting(self, op: str, name: str, layer: int, states: ml.Tensor, count: int) -> StateSpec:
        """The specification of a state, taken from ``states`` if it is unknown; ``states`` must be ``count``
        of them.
        """
        check_whole(op, "layer", layer)
        known = self.get(name, layer)
        shape = states.shape[1:] if known is None else known.shape
        if states.shape != (count, *shape):
            raise InvalidRangeError(
                f"{op}: {states.shape}; of state {name!r:.40} of layer {layer} it must be {(count, *shape)}"
            )
        if known is None:
            check_state_name(op, name)
            known = self._used[name, layer] = StateSpec(shape, states.dtype)
        dtype = self._dtype(known)
        if states.dtype.is_float != dtype.is_float:
            raise ml.DTypeError(
                f"{op}: {states.dtype.name} for state {name!r:.40} of layer {layer}, which is {dtype.name}; "
                "cast it, or declare another dtype in states="
            )
        return known

    def known(self, op: str, name: str, layer: int) -> StateSpec:
        """The specification of a state. Raises OrderError if it is unknown."""
        check_whole(op, "layer", layer)
        spec = self.get(name, layer)
        if spec is None:
            raise OrderError(
                f"{op}: the shape of state {name!r:.40} of layer {layer} is not known; declare it in states= "
                "or call update_state first"
            )
        return spec

    def settings(self) -> dict[str, object]:
        """The declarations, JSON-able: "states" is a list of [layer or None, name, shape, dtype]."""
        conv, recurrent = self.default("conv"), self.default("recurrent")
        settings: dict[str, object] = {
            "conv": [*(conv.shape if conv else ()), self._dtype(conv).name],
            "state": [*(recurrent.shape if recurrent else ())],
        }
        others = [
            [layer, name, [*spec.shape], self._dtype(spec).name]
            for layer in sorted(self.declared, key=lambda layer: -1 if layer is None else layer)
            for name, spec in sorted(self.declared[layer].items())
            if layer is not None or (name != "conv" and (name, spec.dtype) != ("recurrent", ml.DType.F32))
        ]
        return settings | {"states": others} if others else settings

    def _dtype(self, spec: StateSpec | None) -> ml.DType:
        return self._activations if spec is None or spec.dtype is None else spec.dtype


def check_state_name(op: str, name: object) -> None:
    if not is_state_name(name):
        raise InvalidRangeError(
            f"{op}: state {name!r:.40}; a name must be a Python identifier of at most {_LONGEST_NAME} "
            "characters"
        )
