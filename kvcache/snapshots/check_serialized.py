"""The metadata of a serialized snapshot, checked once: every field, its type, and the arrays.

Code that reads a checked snapshot needs no checks of its own. Every snapshot has "kind", "begin", "end" and::

    attention   "dtype", "whole", "layers": [[layer, activations, [tensor, ...]], ...]
    states      "states": [[name, layer, tensor], ...]
    encoder     "position", "length", "layers": [[layer, [tensor, tensor]], ...]
    wrapper     "parts": [{...}, ...]

A tensor is [name of an array, axes]. "dtype" names the format of K and V, or one for each: "Q8_0",
"F16/Q4_0". A layer consists of the parts of K, those of V, and one tensor (positions, 1, numbers) for each
extra. If the values are the first numbers of the keys, there are no parts of V, and the snapshot has
"latent": [[layer, v_dim], ...]. Extras are described by "extra": [[layer, [[name, shape of one token], ...]],
...]. A window ("whole") that keeps its first tokens has their number as "keep".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

import ml
from kvcache.cache import InvalidRangeError
from kvcache.storage.formats import CacheFormat
from kvcache.storage.layer_shape import LayerShape, Part
from kvcache.storage.state_specs import is_state_name
from kvcache.stores.errors import SnapshotCorruptError
from kvcache.stores.serialized_snapshot import SerializedSnapshot

__all__ = ["StoredArray", "check_meta", "check_serialized"]

DEEPEST = 16
"""How deeply wrappers may be nested."""


class StoredArray(Protocol):
    """An array of a serialized snapshot, which may not have been read yet."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...


def check_serialized(op: str, serialized: SerializedSnapshot, complete: bool = False) -> tuple[int, int]:
    """[begin, end) of a serialized snapshot. Raises SnapshotCorruptError if it is invalid.

    ``complete`` requires, as for saved conversations, that attention layers store every position and that
    every array belongs to the snapshot.
    """
    return check_meta(op, serialized.meta, serialized.arrays, serialized.arrays.__getitem__, complete)


def check_meta(
    op: str,
    meta: object,
    arrays: Mapping[str, StoredArray],
    positions: Callable[[str], np.ndarray],
    complete: bool = False,
) -> tuple[int, int]:
    """As ``check_serialized``, for a snapshot of which only the array ``positions`` has been read."""
    try:
        return _Check(arrays, positions, complete).serialized(meta)
    except (KeyError, ValueError) as error:
        said = f"it has no array {error}" if isinstance(error, KeyError) else error
        raise SnapshotCorruptError(f"{op}: not a serialized snapshot: {said!s:.200}") from error


class _Check:
    """Each method raises ValueError, or KeyError for a missing array."""

    def __init__(
        self, arrays: Mapping[str, StoredArray], positions: Callable[[str], np.ndarray], complete: bool
    ) -> None:
        self._arrays, self._positions, self._complete = arrays, positions, complete
        self._named: set[str] = set()

    def serialized(self, meta: object) -> tuple[int, int]:
        if not isinstance(meta, Mapping):
            raise ValueError(f"its meta is {meta!r:.40}")
        span = self._snapshot(meta.get("snapshot"), "", DEEPEST)
        if self._complete and (strange := self._arrays.keys() - self._named):
            raise ValueError(f"the array {min(strange)!r:.40} belongs to nothing")
        return span

    def _snapshot(self, value: object, at: str, depth: int) -> tuple[int, int]:
        meta = _typed(value, dict, f"{at}snapshot")
        kind = meta.get("kind")
        begin, end = _count(meta.get("begin"), "begin"), _count(meta.get("end"), "end")
        if begin > end:
            raise ValueError(f"a snapshot of [{begin}, {end})")
        if kind == "attention":
            self._attention(meta, at, begin, end)
        elif kind == "states":
            self._states(meta)
        elif kind == "encoder":
            self._encoder(meta, begin, end)
        elif kind == "wrapper" and depth:
            for i, part in enumerate(_typed(meta.get("parts"), list, "parts")):
                first, last = self._snapshot(part, f"{at}{i}/", depth - 1)
                if first > begin or last != end:  # a window's positions begin at 0
                    raise ValueError(f"part {i} is of [{first}, {last}), the whole of [{begin}, {end})")
        else:
            raise ValueError(f"kind {kind!r:.40}")
        return begin, end

    def _attention(self, meta: dict[str, Any], at: str, begin: int, end: int) -> None:
        positions = self._positions(f"{at}positions")
        _new(self._named, f"{at}positions")
        ascend = positions.ndim == 1 and positions.dtype == np.int64
        if (
            not ascend
            or not bool((positions[1:] > positions[:-1]).all())
            or (positions.size and not begin <= positions[0] <= positions[-1] < end)
        ):
            raise ValueError(f"{at}positions do not ascend within [{begin}, {end})")
        whole = _typed(meta.get("whole"), bool, "whole")
        if _count(meta.get("keep", 0), "keep") and not whole:
            raise ValueError(f"keep={meta['keep']} without a window")
        if self._complete and not whole and positions.size != end - begin:
            raise ValueError(f"{positions.size} positions of [{begin}, {end})")
        stored = _format(meta.get("dtype"))
        latent, extra = _latent(meta.get("latent", [])), _extra(meta.get("extra", []))
        seen: set[int] = set()
        for entry in _typed(meta.get("layers"), list, "layers"):
            number, activations, tensors = _items(entry, 3, "a layer")
            _new(seen, _count(number, "a layer's number"))
            computed = _dtype(activations)
            _float(computed, f"layer {number}")
            parts = [self._tensor(part) for part in _typed(tensors, list, f"the parts of layer {number}")]
            more = latent.pop(number, None), extra.pop(number, [])
            self._stored(parts, stored, computed, positions.size, f"layer {number}", *more)
        if strange := latent.keys() | extra.keys():
            raise ValueError(f"layers {sorted(strange)} are described, and not there")

    def _stored(
        self, parts: list[Part], stored: CacheFormat, activations: ml.DType, count: int, what: str,
        v_dim: int | None, extra: list[tuple[str, tuple[int, ...]]],
    ) -> None:  # fmt: skip
        """Check the parts of K, of V unless K contains the values, and of extras, (count, heads, width)
        each.
        """
        for shape, dtype in parts:
            if len(shape) != 3 or shape[0] != count or not all(shape[1:]):
                raise ValueError(f"{what}: {dtype.name} {shape} of {count} positions")
        try:
            LayerShape.of_parts(stored, activations, parts, v_dim, extra)
        except InvalidRangeError as error:
            raise ValueError(f"{what}: {error}") from error

    def _states(self, meta: dict[str, Any]) -> None:
        seen: set[tuple[str, int]] = set()
        for entry in _typed(meta.get("states"), list, "states"):
            name, number, tensor = _items(entry, 3, "a state")
            if not is_state_name(name):
                raise ValueError(f"{name!r:.40} is no state")
            _new(seen, (name, _count(number, "a state's layer")))
            shape, _ = self._tensor(tensor)
            if shape[:1] != (1,) or not all(shape):
                raise ValueError(f"the {name} state of layer {number}: {shape}, and not of one sequence")

    def _encoder(self, meta: dict[str, Any], begin: int, end: int) -> None:
        position, length = meta.get("position", ""), _count(meta.get("length"), "length")
        layers = _typed(meta.get("layers"), list, "layers")
        if position is None:
            if layers or length:
                raise ValueError("an encoder's output that came with no token")
            return
        if not begin <= _count(position, "position") < end:
            raise ValueError(f"an encoder's output of position {position} in [{begin}, {end})")
        seen: set[int] = set()
        for entry in layers:
            number, pair = _items(entry, 2, "a layer")
            _new(seen, _count(number, "a layer's number"))
            for tensor in _items(pair, 2, f"layer {number}"):
                shape, dtype = self._tensor(tensor)
                _float(dtype, f"layer {number}")
                if len(shape) != 3 or shape[0] != length or not all(shape[1:]):
                    raise ValueError(f"layer {number}: {shape} of an encoder's output of {length}")

    def _tensor(self, entry: object) -> tuple[tuple[int, ...], ml.DType]:
        """The shape, with axes in the snapshot's order, and dtype of [name, axes]; each array may be named
        once.
        """
        name, axes = _items(entry, 2, "a tensor")
        _new(self._named, _typed(name, str, "an array's name"))
        array = self._arrays[name]
        shape = array.shape
        order = [_count(axis, "an axis") for axis in _typed(axes, list, f"the axes of {name}")]
        if sorted(order) != list(range(len(shape))):
            raise ValueError(f"{name}: axes {order} of an array of {len(shape)}")
        return tuple(shape[order.index(i)] for i in range(len(shape))), ml.DType.from_numpy(array.dtype)


def _latent(value: object) -> dict[int, int]:
    """For each layer, how many numbers of K are its values."""
    latent: dict[int, int] = {}
    for entry in _typed(value, list, "latent"):
        number, v_dim = (_count(one, "a latent layer") for one in _items(entry, 2, "a latent layer"))
        _new(set(latent), number)
        latent[number] = v_dim
    return latent


def _extra(value: object) -> dict[int, list[tuple[str, tuple[int, ...]]]]:
    """For each layer, the names and shapes of its extras."""
    extra: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
    for entry in _typed(value, list, "extra"):
        number, specs = _items(entry, 2, "the extras of a layer")
        _new(set(extra), _count(number, "a layer's number"))
        named: dict[str, tuple[int, ...]] = {}
        for spec in _typed(specs, list, f"the extras of layer {number}"):
            name, shape = _items(spec, 2, "an extra")
            _new(set(named), _typed(name, str, "an extra's name"))
            named[name] = tuple(
                _count(size, "a size") for size in _typed(shape, list, f"the shape of {name!r:.40}")
            )
        if list(named) != sorted(named):
            raise ValueError(f"the extras of layer {number} are not sorted by name")
        extra[number] = [*named.items()]
    return extra


def _typed(value: object, kind: type, what: str) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{what} is {value!r:.40}")
    return value


def _items(value: object, count: int, what: str) -> list[Any]:
    if type(value) is not list or len(value) != count:
        raise ValueError(f"{what} is {value!r:.40}, and no list of {count}")
    return value


def _count(value: object, what: str) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{what} is {value!r:.40}")
    return value


def _dtype(value: object) -> ml.DType:
    if type(value) is not str or value not in ml.DType.__members__:
        raise ValueError(f"a dtype is {value!r:.40}")
    return ml.DType[value]


def _format(value: object) -> CacheFormat:
    """The formats of that name, as written in snapshots."""
    try:
        stored = CacheFormat.of(value) if type(value) is str else None
    except (ml.DTypeError, ml.NotSupportedError, ml.PluginError) as error:
        raise ValueError(f"a format is {value!r:.40} ({error})") from error
    if stored is None or stored.name != value:
        raise ValueError(f"a format is {value!r:.40}")
    return stored


def _float(dtype: ml.DType, what: str) -> None:
    if not dtype.is_float:
        raise ValueError(f"{what} in {dtype.name}")


def _new(seen: set[Any], value: Any) -> None:
    if value in seen:
        raise ValueError(f"{value!r:.40} is there twice")
    seen.add(value)
