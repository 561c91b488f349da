"""Serialized snapshots, and their bytes in the safetensors format.

::

    8 bytes      little-endian length n of the header
    n bytes      JSON, padded with spaces so that the data begin at a multiple of 64:
                 {"__metadata__": {"format": ..., "meta": JSON text}, name: {dtype, shape, data_offsets}, ...}
    the rest     the arrays, wide elements first, with no gap and no overlap

Source: https://huggingface.co/docs/safetensors (format). ``safetensors`` reads what ``pack`` writes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from kvcache.stores import strict_json
from kvcache.stores.buffers import Buffer, as_bytes
from kvcache.stores.errors import SnapshotCorruptError, StoreError, StoreValueError
from kvcache.stores.protocol import Reader, SnapshotStore
from ml import DType, ShapeError
from ml.dtypes import STORAGE_DTYPES

__all__ = [
    "SNAPSHOT_DIGEST",
    "SNAPSHOT_FORMAT",
    "Outline",
    "Place",
    "SerializedSnapshot",
    "digest_of_snapshot",
    "get_snapshot",
    "pack",
    "put_snapshot",
    "read_outline",
    "snapshots_of",
    "unpack",
]

SNAPSHOT_FORMAT = "kvcache.page/1"
SNAPSHOT_DIGEST = "sha256"
"""The key in ``meta`` under which a snapshot saved as a file has the digest of everything else."""
ALIGNMENT = 64
MAX_HEADER = 1 << 24
"""The largest header in bytes, enough for over a hundred thousand arrays; it bounds the parsing of foreign
data.
"""
MAX_NDIM = 32
MAX_VALUES = 1 << 20
"""The most JSON values in a header and in its meta, enough for a hundred thousand arrays."""
REMEMBERED = 1 << 16
"""The longest header, in bytes, that is remembered, so that an equal one need not be parsed again."""

_METADATA = "__metadata__"
_FRONT = re.compile(rb'(\{"__metadata__":\{"format":"[^"\\]*","meta":"(?:[^"\\]|\\.)*"\}),')
"""The bytes that ``pack`` writes before the first array."""
_DTYPES = {dtype.name: dtype.numpy for dtype in STORAGE_DTYPES}


@dataclass(frozen=True, eq=False)
class SerializedSnapshot:
    """A snapshot in host memory: named arrays, and JSON-able ``meta`` that describes them.

    Arrays are C-contiguous, of the dtypes of ``ml.DType`` (bfloat16 is ``ml_dtypes.bfloat16``);
    they are referenced, not copied.

    Raises ShapeError for an array that is not contiguous, DTypeError for another dtype, ValueError for
    the name ``__metadata__``.

    >>> import numpy as np
    >>> from kvcache.stores import SerializedSnapshot, pack, unpack
    >>> snapshot = SerializedSnapshot({"note": "anything"}, {"x": np.arange(3, dtype=np.float32)})
    >>> unpack(b"".join(pack(snapshot))).arrays["x"].tolist()
    [0.0, 1.0, 2.0]
    """

    meta: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, array in self.arrays.items():
            if name == _METADATA:
                raise ValueError(f"SerializedSnapshot: the name {name!r} is reserved by the format")
            DType.from_numpy(array.dtype)
            if not array.flags.c_contiguous:
                raise ShapeError(
                    f"SerializedSnapshot: {name!r} {array.shape} with strides {array.strides} "
                    "is not C-contiguous; pass numpy.ascontiguousarray of it"
                )

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())


def pack(snapshot: SerializedSnapshot) -> list[memoryview]:
    """The bytes of a snapshot in order: a header, then views of the arrays, which are not copied.

    Raises ValueError if ``meta`` is not JSON-able or a name is not Unicode text.
    """
    ordered = sorted(snapshot.arrays.items(), key=lambda item: -item[1].dtype.itemsize)
    places: dict[str, tuple[int, int]] = {}
    end = 0
    for name, array in ordered:
        places[name] = (end, end + array.nbytes)
        end += array.nbytes
    entries: dict[str, Any] = {
        _METADATA: {"format": SNAPSHOT_FORMAT, "meta": strict_json.encode(dict(snapshot.meta))}
    }
    for name, array in snapshot.arrays.items():
        dtype = DType.from_numpy(array.dtype).name
        entries[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": list(places[name])}
    text = strict_json.encode(entries).encode("utf-8")
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > MAX_HEADER:
        raise ValueError(f"pack: a header of {len(text)} bytes; at most {MAX_HEADER} are allowed")
    header = memoryview(len(text).to_bytes(8, "little") + text)
    return [header, *(as_bytes(array) for _, array in ordered if array.nbytes)]


def unpack(buffer: Buffer) -> SerializedSnapshot:
    """The snapshot with these bytes; its arrays are views of ``buffer`` (read-only if it is).

    Raises SnapshotCorruptError for anything but a well-formed snapshot. Damage in the arrays' data is not
    detected here but by a store's digest.
    """
    data = as_bytes(buffer)
    try:
        length = _header_length(data[:8], len(data))
        outline = _outline(bytes(data[8 : 8 + length]), len(data) - 8 - length)
        arrays = {name: _array(name, place, data[8 + length :]) for name, place in outline.places.items()}
    except (ValueError, OverflowError) as error:
        raise SnapshotCorruptError(
            f"unpack: {len(data)} bytes are not a serialized snapshot: {error!s:.200}"
        ) from error
    return SerializedSnapshot(outline.meta, arrays)


def digest_of_snapshot(snapshot: SerializedSnapshot) -> str:
    """sha256 (hex) of the meta (without ``SNAPSHOT_DIGEST``) and of each array's name, dtype, shape and
    bytes.
    """
    meta = {name: value for name, value in snapshot.meta.items() if name != SNAPSHOT_DIGEST}
    digest = hashlib.sha256(strict_json.encode(meta, canonical=True).encode())
    for name in sorted(snapshot.arrays):
        array = snapshot.arrays[name]
        digest.update(strict_json.encode([name, array.dtype.name, list(array.shape)]).encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def snapshots_of(serialized: SerializedSnapshot) -> list[SerializedSnapshot]:
    """The snapshots of a file: the snapshot itself, or those that its meta lists as ``snapshots``, in order.

    The arrays of the i-th snapshot are named "i:" followed by their own name. Raises ValueError or
    LookupError if they are missing.
    """
    if "snapshots" not in serialized.meta:
        return [serialized]
    arrays: list[dict[str, np.ndarray]] = [{} for _ in serialized.meta["snapshots"]]
    for name, array in serialized.arrays.items():
        i, _, own = name.partition(":")
        arrays[int(i)][own] = array
    listed = zip(serialized.meta["snapshots"], arrays, strict=True)
    return [SerializedSnapshot({"snapshot": one}, own) for one, own in listed]


def put_snapshot(store: SnapshotStore, key: str, snapshot: SerializedSnapshot) -> bool:
    """``store.put`` the snapshot's bytes, without copying the arrays first."""
    return store.put(key, pack(snapshot))


def get_snapshot(store: SnapshotStore, key: str) -> SerializedSnapshot | None:
    """The snapshot of ``key``, in memory of its own; None for a miss.

    The first array is aligned to 64 bytes. Raises SnapshotCorruptError if the entry is damaged or is not a
    serialized snapshot; the entry is then dropped.
    """
    (stat,) = store.stat([key])
    if stat is None:
        return None
    buffer = _aligned(stat.nbytes)
    try:
        if not store.get_into(key, buffer):
            return None
    except StoreValueError:
        return None  # an entry of another size has replaced it in between
    try:
        return unpack(buffer)
    except SnapshotCorruptError:
        with contextlib.suppress(StoreError):
            store.delete(key)
        raise


def _aligned(nbytes: int) -> np.ndarray:
    room = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + nbytes]


class Place(NamedTuple):
    """An array that has not been read yet: its bytes are ``[begin, end)``, counted from the first array."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Outline:
    """The content of a header: the meta, and the place of each array."""

    meta: Mapping[str, Any]
    places: Mapping[str, Place]
    """The places of the arrays, in the header's order."""


def read_outline(reader: Reader) -> Outline:
    """Read the header of a serialized snapshot; the reader is then at the first array.

    Raises SnapshotCorruptError as ``unpack`` does. The digest has not been checked yet: the header is
    well-formed, but may be wrong.
    """
    size = reader.left
    try:
        start = bytearray(min(8, size))
        reader.fill([start])
        header = bytearray(_header_length(start, size))
        reader.fill([header])
        return _outline(bytes(header), reader.left)
    except (ValueError, OverflowError) as error:
        raise SnapshotCorruptError(
            f"read_outline: {size} bytes are not a serialized snapshot: {error!s:.200}"
        ) from error


def _header_length(start: Buffer, size: int) -> int:
    """The length of the header of a snapshot of ``size`` bytes, whose first eight bytes are ``start``."""
    if size < 8:
        raise ValueError("shorter than the length of its header")
    length = int.from_bytes(start, "little")
    if length > min(size - 8, MAX_HEADER):
        raise ValueError(f"a header of {length} bytes")
    return length


def _outline(text: bytes, size: int) -> Outline:
    front = _FRONT.match(text) if len(text) <= REMEMBERED else None
    if front is not None:
        meta = _meta(strict_json.decode(text[: front.end(1)] + b"}")[_METADATA])
        return Outline(meta, _entries(b"{" + text[front.end() :], size))
    header = strict_json.decode(text, MAX_VALUES)
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    return Outline(_meta(header.pop(_METADATA, None)), _places(header, size))


@functools.lru_cache(maxsize=32)
def _entries(text: bytes, size: int) -> Mapping[str, Place]:
    """The arrays by a header's text behind its metadata: the snapshots of a conversation share it."""
    header = strict_json.decode(text)
    if _METADATA in header:
        raise ValueError("its metadata are given twice")
    return _places(header, size)


def _places(entries: Mapping[str, object], size: int) -> Mapping[str, Place]:
    places = {name: _place(name, entry) for name, entry in entries.items()}
    _check_cover(places, size)
    return MappingProxyType(places)


def _meta(metadata: object) -> dict[str, Any]:
    if not isinstance(metadata, dict) or metadata.get("format") != SNAPSHOT_FORMAT:
        raise ValueError(f"its format is not {SNAPSHOT_FORMAT}")
    text = metadata.get("meta")
    meta = strict_json.decode(text, MAX_VALUES) if isinstance(text, str) else None
    if not isinstance(meta, dict):
        raise ValueError("its meta is not a JSON object")
    return meta


def _check_cover(places: Mapping[str, Place], size: int) -> None:
    end = 0
    for begin, stop in sorted((place.begin, place.end) for place in places.values()):
        if begin != end:
            raise ValueError(f"an array begins at byte {begin}, and the one before it ends at {end}")
        end = stop
    if end != size:
        raise ValueError(f"its arrays take {end} bytes, and {size} are there")


def _place(name: str, entry: object) -> Place:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the entry of {name!r} is not dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"{name!r} has the dtype {dtype!r}")
    if not _counts(shape) or len(shape) > MAX_NDIM:
        raise ValueError(f"{name!r} has no shape")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{name!r} has no data_offsets")
    if math.prod(shape) * _DTYPES[dtype].itemsize != offsets[1] - offsets[0]:
        raise ValueError(f"{name!r} of shape {shape} takes other than {offsets[1] - offsets[0]} bytes")
    return Place(_DTYPES[dtype], tuple(shape), *offsets)


def _counts(value: object) -> bool:
    """Whether this is a list of integers from 0 to 2**63 - 1."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _array(name: str, place: Place, data: memoryview) -> np.ndarray:
    dtype, shape, begin, end = place
    raw = np.frombuffer(data[begin:end], np.uint8) if end > begin else np.empty(0, np.uint8)
    if dtype == np.bool_ and raw.size and int(raw.max()) > 1:
        raise ValueError(f"{name!r} is BOOL and holds a byte other than 0 and 1")
    return raw.view(dtype).reshape(shape)
