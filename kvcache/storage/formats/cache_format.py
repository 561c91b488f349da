"""The storage formats of keys and values of a cache."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import ml
from kvcache.cache import CacheDType, InvalidRangeError, StorageFormat
from kvcache.storage.formats.names import METHODS, keep_format, open_format
from kvcache.storage.formats.plain import Plain

_NAMES = ", ".join(dtype.name for dtype in ml.DType if dtype.is_float or dtype.is_quantized)


@dataclass(frozen=True, slots=True, eq=False)
class CacheFormat:
    """The formats of K and V. Two are equal if their names are: they then store the same codes.

    >>> from kvcache import CacheFormat
    >>> CacheFormat.of(("Q8_0", "Q4_0")).name
    'Q8_0/Q4_0'
    """

    key: StorageFormat
    value: StorageFormat

    @classmethod
    def of(cls, dtype: CacheDType | CacheFormat) -> CacheFormat:
        """The formats for ``init(dtype=...)``: one for both or a pair, each given as a format or by name.

        A pair also has a name, such as "Q8_0/Q4_0". Raises DTypeError for anything else.
        """
        if isinstance(dtype, CacheFormat):
            return dtype
        named = tuple(dtype.split("/")) if isinstance(dtype, str) else dtype
        pair = named if isinstance(named, (tuple, list)) else (named,)
        if len(pair) not in (1, 2):
            raise ml.DTypeError(
                f"init: dtype={dtype!r:.60}; it must be one for both K and V, or a pair, of {_NAMES}"
            )
        return cls(_one(pair[0]), _one(pair[-1]))

    @property
    def asked(self) -> CacheDType:
        """The corresponding argument of ``init``."""
        return self.key, self.value

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        key, value = self.key.name, self.value.name
        return key if key == value else f"{key}/{value}"

    @property
    def plain(self) -> ml.DType | None:
        """The dtype, if K and V are plain numbers of the same dtype; else None."""
        key = self.key
        return key.dtype if isinstance(key, Plain) and key == self.value else None

    @property
    def dtypes(self) -> frozenset[ml.DType]:
        """The dtypes of the parts for F32 input, as far as they are known without the head size."""
        dtypes: set[ml.DType] = set()
        for one in (self.key, self.value):
            with contextlib.suppress(InvalidRangeError):  # a format with another block size
                dtypes.update(dtype for _, dtype in one.parts(256, ml.DType.F32))
        return frozenset(dtypes)

    def check(self, key_dim: int, value_dim: int | None, activations: ml.DType) -> None:
        """Raise InvalidRangeError for head sizes that the formats do not support; ``value_dim`` None: K
        contains the values.
        """
        self.key.parts(key_dim, activations)
        if value_dim is not None:
            self.value.parts(value_dim, activations)

    def nbytes(self, heads: int, key_dim: int, value_dim: int | None, activations: ml.DType) -> int:
        """Bytes of one token's K and V in a layer; ``value_dim`` None: K contains the values."""
        values = () if value_dim is None else self.value.parts(value_dim, activations)
        parts = (*self.key.parts(key_dim, activations), *values)
        return heads * sum(width * dtype.itemsize for width, dtype in parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CacheFormat) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


def _one(dtype: object) -> StorageFormat:
    if isinstance(dtype, str):
        try:
            return open_format(dtype)
        except ml.DTypeError as error:
            reason = str(error).removeprefix("open_format: ")
            raise ml.DTypeError(f"init: dtype={dtype!r:.60}: {reason}") from None
    if isinstance(dtype, ml.DType):
        if dtype.is_float or dtype.is_quantized:
            return open_format(dtype.name)
    elif not isinstance(dtype, type) and all(callable(getattr(dtype, name, None)) for name in METHODS):
        return keep_format(dtype)  # type: ignore[arg-type]
    raise ml.DTypeError(
        f"init: dtype={dtype!r:.60}; it must be an ml.DType of {_NAMES}, or a kvcache.StorageFormat"
    )
