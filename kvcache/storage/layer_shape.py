"""What a layer stores for a token: keys, values or the part of the keys that contains them, and extras."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import ml
from kvcache.cache import InvalidRangeError
from kvcache.storage.formats import CacheFormat

Part = tuple[tuple[int, ...], ml.DType]
"""Shape (tokens, heads, width) and dtype of a stored part."""


class ExtraSpec(NamedTuple):
    """The shape and dtype of an extra: a tensor stored for each token beside K and V."""

    name: str
    shape: tuple[int, ...]
    """The shape of one token's tensor."""
    dtype: ml.DType

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class LayerShape(NamedTuple):
    """What a layer stores for each token: (heads, dim) of keys and of values, and extras.

    >>> import ml
    >>> from kvcache import LayerShape
    >>> from kvcache import CacheFormat
    >>> LayerShape((8, 64), (8, 64)).nbytes(CacheFormat.of("F16"), ml.DType.F32)
    2048
    """

    key: tuple[int, int]
    value: tuple[int, int]
    is_latent: bool = False
    """Whether the values are the first numbers of the keys, which are stored once."""
    extra: tuple[ExtraSpec, ...] = ()
    """The extras by name."""

    def __str__(self) -> str:
        return self.told("tokens")

    def told(self, tokens: object) -> str:
        """The shapes of ``tokens`` tokens, for messages."""

        def of(*shape: int) -> str:
            return f"({', '.join(map(str, (tokens, *shape)))})"

        value = f"its first {self.value[1]} as value" if self.is_latent else f"value {of(*self.value)}"
        extra = "".join(f", {one.name} {one.dtype.name} {of(*one.shape)}" for one in self.extra)
        return f"key {of(*self.key)} and {value}{extra}"

    def nbytes(self, stored: CacheFormat, activations: ml.DType) -> int:
        """Bytes of one token, put as ``activations`` and stored as ``stored``.

        Raises InvalidRangeError if a format does not support keys or values of this size.
        """
        heads, dim = self.key
        extra = sum(one.size * one.dtype.itemsize for one in self.extra)
        return extra + stored.nbytes(heads, dim, None if self.is_latent else self.value[1], activations)

    @classmethod
    def of_parts(
        cls,
        stored: CacheFormat,
        activations: ml.DType,
        parts: Sequence[Part],
        v_dim: int | None = None,
        extra: Sequence[tuple[str, tuple[int, ...]]] = (),
    ) -> LayerShape:
        """The shape that corresponds to stored parts: those of K, of V (unless ``v_dim`` is given) and of
        extras.

        Raises InvalidRangeError for parts that ``stored`` does not produce from ``activations``.
        """
        tokens, heads = (*parts[0][0], 0, 0)[:2] if parts else (0, 0)
        count = len(parts) - len(extra)
        own, rest = parts[: max(0, count)], parts[max(0, count) :]
        if count < 1 or any(len(shape) != 3 or shape[:2] != (tokens, heads) for shape, _ in own):
            raise InvalidRangeError(
                f"parts {[shape for shape, _ in parts]}; each is (tokens, kv_heads, width) of as many tokens"
            )
        formats = (stored.key, stored.value) if v_dim is None else (stored.key,)
        dims, left = [], [*own]
        for one in formats:
            dim = one.head_dim(left[0][0][2] if left else 0)
            made = one.parts(dim, activations)
            widths = [(shape[2], dtype) for shape, dtype in left[: len(made)]]
            if widths != [*made]:
                raise InvalidRangeError(
                    f"{one.name} of {activations.name}: parts {_told(widths)}; it makes {_told(made)}"
                )
            dims.append(dim)
            left = left[len(made) :]
        if left:
            raise InvalidRangeError(f"{stored.name}: {len(left)} parts too many, {left}")
        specs = tuple(_extra_part(tokens, *one, *part) for one, part in zip(extra, rest, strict=True))
        if v_dim is None:
            return cls((heads, dims[0]), (heads, dims[1]), False, specs)
        return cls((heads, dims[0]), (heads, latent_dim(dims[0], v_dim)), True, specs)


def _extra_part(
    tokens: int, name: str, shape: tuple[int, ...], part: tuple[int, ...], dtype: ml.DType
) -> ExtraSpec:
    spec = ExtraSpec(name, tuple(shape), dtype)
    if part != (tokens, 1, spec.size):
        raise InvalidRangeError(f"extra {name}: {part}; it is {(tokens, 1, spec.size)} of {shape} per token")
    return spec


def latent_dim(dim: int, v_dim: int | None) -> int:
    """How many numbers of a key are its value; None: all ``dim``. Raises InvalidRangeError outside 1 to
    ``dim``.
    """
    values = dim if v_dim is None else v_dim
    if type(values) is not int or not 1 <= values <= dim:
        raise InvalidRangeError(f"put: v_dim={v_dim!r:.40} of keys of {dim}; it must be 1 to {dim}")
    return values


def _told(parts: Sequence[tuple[int, ml.DType]]) -> str:
    return ", ".join(f"{dtype.name} of {width}" for width, dtype in parts) or "none"
