"""Element types, shared by every backend."""

from __future__ import annotations

import enum
import functools

import ml_dtypes
import numpy as np

from ml.errors import DTypeError

__all__ = ["STORAGE_DTYPES", "DType"]


class DType(enum.Enum):
    """The element type of a tensor.

    ``Q8_0`` and ``Q4_0`` are storage formats of a cache only (blocks of 32 values with one F16
    scale, as in GGML): no tensor has them, and creating one raises ``ml.DTypeError``.

    >>> import ml
    >>> ml.DType.BF16.itemsize, ml.DType.from_numpy("float32")
    (2, DType.F32)
    """

    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    I8 = "I8"
    U8 = "U8"
    I32 = "I32"
    I64 = "I64"
    BOOL = "BOOL"
    Q8_0 = "Q8_0"
    Q4_0 = "Q4_0"

    # Hot paths compare and hash dtypes; Enum's own __hash__ is a Python function.
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"DType.{self.name}"

    @functools.cached_property
    def itemsize(self) -> int:
        """Bytes of one element. Raises DTypeError for the block formats, which have none."""
        return int(self.numpy.itemsize)

    @functools.cached_property
    def is_float(self) -> bool:
        return self in (DType.F32, DType.F16, DType.BF16)

    @functools.cached_property
    def is_integer(self) -> bool:
        return self in (DType.I8, DType.U8, DType.I32, DType.I64)

    @functools.cached_property
    def is_quantized(self) -> bool:
        return self in (DType.Q8_0, DType.Q4_0)

    @functools.cached_property
    def numpy(self) -> np.dtype:
        """The NumPy dtype with the same representation; BF16 is ``ml_dtypes.bfloat16``."""
        try:
            return _NUMPY[self]
        except KeyError:
            raise DTypeError(
                f"{self!r} has no element type: it is a storage format of a cache; "
                "pass it to Cache.init(dtype=...) only"
            ) from None

    @classmethod
    def from_numpy(cls, dtype: object) -> DType:
        """The DType with the same representation as a NumPy dtype. Raises DTypeError if there is none."""
        numpys = np.dtype(dtype)  # type: ignore[call-overload]
        try:
            return _FROM_NUMPY[numpys]
        except KeyError:
            names = ", ".join(str(known) for known in _FROM_NUMPY)
            raise DTypeError(
                f"NumPy's {numpys} has no DType; convert it with astype, these have one: {names}"
            ) from None


_NUMPY: dict[DType, np.dtype] = {
    DType.F32: np.dtype(np.float32),
    DType.F16: np.dtype(np.float16),
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
    DType.I8: np.dtype(np.int8),
    DType.U8: np.dtype(np.uint8),
    DType.I32: np.dtype(np.int32),
    DType.I64: np.dtype(np.int64),
    DType.BOOL: np.dtype(np.bool_),
}
_FROM_NUMPY = {dtype: name for name, dtype in _NUMPY.items()}

STORAGE_DTYPES: frozenset[DType] = frozenset(_NUMPY)
"""The dtypes that a tensor may have: all but the block formats."""
