"""Pages and their bytes: the safetensors layout, read by safetensors, and by us when it is well formed."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import ml
from kvcache.stores import (
    SNAPSHOT_FORMAT,
    MemoryStore,
    SerializedSnapshot,
    SnapshotCorruptError,
    get_snapshot,
    pack,
    put_snapshot,
    strict_json,
    unpack,
)
from kvcache.stores.serialized_snapshot import MAX_VALUES
from ml.dtypes import STORAGE_DTYPES

from ...rigs.memory import peak_memory

DTYPES = [dtype.numpy for dtype in STORAGE_DTYPES]
META = {"kind": "attention", "begin": 0, "end": 7, "layers": [0, 1], "é": None}


def sample() -> SerializedSnapshot:
    random = np.random.default_rng(3)
    arrays = {
        f"layer.{i}.{dtype}": random.integers(0, 2, size=(2, 3, i)).astype(dtype)
        for i, dtype in enumerate(DTYPES)
    }
    return SerializedSnapshot(
        META, {**arrays, "position": np.array(7, np.int64), "größe": np.ones(3, np.float32)}
    )


def packed(page: SerializedSnapshot) -> bytes:
    return b"".join(pack(page))


def same(one: SerializedSnapshot, other: SerializedSnapshot) -> None:
    assert one.meta == other.meta
    assert list(one.arrays) == list(other.arrays)
    for name, array in one.arrays.items():
        found = other.arrays[name]
        assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())


# What pack writes.


def test_a_page_comes_back_bit_by_bit() -> None:
    for page in (sample(), SerializedSnapshot()):
        same(page, unpack(packed(page)))
        same(page, unpack(memoryview(b"?" + packed(page))[1:]))  # from an unaligned buffer


def test_pack_copies_no_array() -> None:
    page = sample()
    _, *parts = pack(page)
    for part in parts:
        assert any(np.shares_memory(np.frombuffer(part, np.uint8), array) for array in page.arrays.values())
    assert (
        sum(len(part) for part in parts) == page.nbytes == sum(array.nbytes for array in page.arrays.values())
    )


def test_unpack_copies_nothing_and_is_read_only_where_the_buffer_is() -> None:
    buffer = bytearray(packed(sample()))
    found = unpack(buffer).arrays["größe"]
    assert np.shares_memory(found, np.frombuffer(buffer, np.uint8))
    assert found.flags.writeable
    assert not unpack(bytes(buffer)).arrays["größe"].flags.writeable


def test_safetensors_reads_what_pack_writes() -> None:
    found = dict(safetensors.deserialize(packed(sample())))
    expected = sample().arrays
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert tuple(found[name]["shape"]) == array.shape
        assert bytes(found[name]["data"]) == array.tobytes()
        assert found[name]["dtype"] == ml.DType.from_numpy(array.dtype).name


def test_unpack_reads_a_page_that_safetensors_wrote() -> None:
    arrays = {"a": np.arange(6, dtype=np.float16).reshape(2, 3), "b": np.arange(3, dtype=np.int64)}
    written = safetensors.numpy.save(arrays, {"format": SNAPSHOT_FORMAT, "meta": '{"x":1}'})
    found = unpack(written)
    assert found.meta == {"x": 1}
    assert {name: array.tolist() for name, array in found.arrays.items()} == {
        name: array.tolist() for name, array in arrays.items()
    }


# What a page is not made of.


@pytest.mark.parametrize(
    ("name", "array", "error", "match"),
    [
        ("a", np.zeros((4, 4), np.float32)[:, 1:], ml.ShapeError, "ascontiguousarray"),
        ("__metadata__", np.zeros(2, np.float32), ValueError, "__metadata__"),
        *(
            ("a", np.zeros(2, dtype), ml.DTypeError, "")
            for dtype in (np.float64, np.uint16, np.complex64, ">f4", object)
        ),
    ],
)
def test_an_array_that_no_page_has_is_refused(
    name: str, array: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match or None):
        SerializedSnapshot({}, {name: array})


WITHIN: dict[str, Any] = {}
WITHIN["self"] = WITHIN


@pytest.mark.parametrize(
    "meta", [{"a": float("nan")}, {"a": {1: 2}}, {"a": object()}, {"a": "\ud800"}, WITHIN]
)
def test_meta_that_json_cannot_say_is_refused(meta: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="JSON-able"):
        pack(SerializedSnapshot(meta))


# What is no page.


def framed(header: bytes | str | dict[str, Any], data: bytes = b"") -> bytes:
    if isinstance(header, dict):
        header = json.dumps(header)
    text = header.encode("utf-8") if isinstance(header, str) else header
    return struct.pack("<Q", len(text)) + text + data


METADATA = {"format": SNAPSHOT_FORMAT, "meta": "{}"}


def nested(depth: int) -> str:
    """JSON text, with brackets in strings too, which are no depth."""
    return '{"[{\\"[": ["[\\\\"], "a":' * depth + "1" + "}" * depth


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, Any]:
    return {"__metadata__": METADATA, "a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def two(first: tuple[int, int], second: tuple[int, int]) -> dict[str, Any]:
    spans = {"a": first, "b": second}
    return {"__metadata__": METADATA} | {
        name: {"dtype": "U8", "shape": [span[1] - span[0]], "data_offsets": span}
        for name, span in spans.items()
    }


DATA = b"12345678"
HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "less than a length": b"1234567",
    "a header longer than the buffer": struct.pack("<Q", 100) + b"{}",
    "a header of 2**64 - 1 bytes": b"\xff" * 8 + b"{}",
    "a header of 2**63 bytes": struct.pack("<Q", 2**63) + b"{}",
    "no JSON": framed("nonsense"),
    "no UTF-8": framed(b'{"\xff": 1}'),
    "no object": framed("[]"),
    "a deep header": framed("[" * 100_000 + "]" * 100_000),
    "a meta that is too deep": framed({"__metadata__": {**METADATA, "meta": nested(100)}}),
    "a deep meta": framed({"__metadata__": {**METADATA, "meta": '{"a":' * 50_000 + "1" + "}" * 50_000}}),
    "a number of a million digits": framed('{"__metadata__": ' + "9" * 1_000_000 + "}"),
    "NaN": framed('{"__metadata__": NaN}'),
    "a number beyond floats": framed({"__metadata__": {**METADATA, "meta": '{"a":-1e999}'}}),
    "a name given twice": framed('{"__metadata__": 1, "__metadata__": 2}'),
    "a name that is no Unicode": framed('{"__metadata__": {"format": "x"}, "\\ud800": {}}'),
    "no metadata": framed({"a": entry()["a"]}, DATA),
    "a foreign format": framed({"__metadata__": {"format": "pt", "meta": "{}"}}),
    "a later format": framed({"__metadata__": {"format": "kvcache.page/2", "meta": "{}"}}),
    "no meta": framed({"__metadata__": {"format": SNAPSHOT_FORMAT}}),
    "meta that is no text": framed({"__metadata__": {"format": SNAPSHOT_FORMAT, "meta": {}}}),
    "meta that is no JSON": framed({"__metadata__": {"format": SNAPSHOT_FORMAT, "meta": "{"}}),
    "meta that is no object": framed({"__metadata__": {"format": SNAPSHOT_FORMAT, "meta": "[]"}}),
    "an unknown dtype": framed(entry("F8_E4M3", [8]), DATA),
    "a storage format as dtype": framed(entry("Q8_0", [8]), DATA),
    "a dtype that is no text": framed(entry(["F32"]), DATA),
    "a dtype of NumPy's": framed(entry("object", [1]), DATA),
    "a shape that is no list": framed(entry(shape=2), DATA),
    "a negative size": framed(entry(shape=[-2]), DATA),
    "two negative sizes": framed(entry(shape=[-1, -2]), DATA),
    "a size that is a float": framed(entry(shape=[2.0]), DATA),
    "a size that is a bool": framed(entry(shape=[2, True]), DATA),
    "a shape for fewer bytes": framed(entry(shape=[1]), DATA),
    "a shape for more bytes": framed(entry(shape=[3]), DATA),
    "a shape for 2**64 more bytes": framed(entry(shape=[2**62 + 2]), DATA),
    "an empty shape of huge sizes": framed(entry(shape=[0, 2**62, 2**62], offsets=[0, 0])),
    "a size beyond 64 bits": framed(entry(shape=[0, 2**70], offsets=[0, 0])),
    "a hundred axes": framed(entry(shape=[1] * 99 + [2]), DATA),
    "no offsets": framed(entry(offsets=[]), DATA),
    "three offsets": framed(entry(offsets=[0, 8, 8]), DATA),
    "offsets the wrong way round": framed(entry(offsets=[8, 0]), DATA),
    "negative offsets": framed(entry(offsets=[-8, 0]), DATA),
    "offsets beyond the data": framed(entry(offsets=[8, 16]), DATA),
    "offsets that are text": framed(entry(offsets=["0", "8"]), DATA),
    "a missing field": framed({"__metadata__": METADATA, "a": {"dtype": "F32", "shape": [2]}}, DATA),
    "a further field": framed({"__metadata__": METADATA, "a": {**entry()["a"], "x": 1}}, DATA),
    "an entry that is no object": framed({"__metadata__": METADATA, "a": 3}),
    "arrays that overlap": framed(two((0, 5), (4, 8)), DATA),
    "arrays on one place": framed(two((0, 8), (0, 8)), DATA),
    "a gap": framed(two((0, 3), (4, 8)), DATA),
    "a gap at the start": framed(two((1, 4), (4, 8)), DATA),
    "bytes beyond the arrays": framed(two((0, 4), (4, 8)), DATA + b"9"),
    "too few bytes": framed(two((0, 4), (4, 8)), DATA[:-1]),
    "a truth of 2": framed(entry("BOOL", [8]), b"\0\1\0\1\2\1\0\1"),
}


def test_what_is_no_page_is_corrupt() -> None:
    for what, data in HOSTILE.items():
        with pytest.raises(SnapshotCorruptError, match="not a serialized snapshot"):
            raise AssertionError(f"{what} was taken for {unpack(data)}")


def test_the_hostile_headers_are_one_step_from_a_page() -> None:
    assert unpack(framed(entry(), DATA)).arrays["a"].shape == (2,)
    assert list(unpack(framed(two((0, 4), (4, 8)), DATA)).arrays) == ["a", "b"]


def test_how_deep_a_meta_may_be_is_the_same_in_both_directions() -> None:
    meta = json.loads(nested(99))
    page = unpack(packed(SerializedSnapshot(meta)))
    assert page.meta == meta
    with pytest.raises(ValueError, match="nested 101 deep; 100 is the limit"):
        pack(SerializedSnapshot({"a": meta}))


def test_every_truncation_is_corrupt() -> None:
    data = packed(sample())
    for length in range(len(data)):
        with pytest.raises(SnapshotCorruptError):
            unpack(data[:length])


def well_formed_or_corrupt(data: bytes) -> None:
    """Either SnapshotCorruptError, or a page that packs to what unpacks to it again."""
    try:
        page = unpack(data)
    except SnapshotCorruptError:
        return
    same(page, unpack(packed(page)))


def test_every_flipped_byte_of_the_header_gives_a_page_or_is_corrupt() -> None:
    data = packed(sample())
    header = len(pack(sample())[0])
    for place in range(header):
        for flip in (1, 0x20, 0x80):
            well_formed_or_corrupt(data[:place] + bytes([data[place] ^ flip]) + data[place + 1 :])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    value=json_values,
    dtype=st.sampled_from(["F32", "U8", "BOOL", "X"]) | json_values,
    shape=st.lists(st.integers(-1, 9), max_size=3) | json_values,
    offsets=st.lists(st.integers(-1, 17), min_size=2, max_size=2) | json_values,
    data=st.binary(max_size=16),
)
def test_any_header_gives_a_page_or_is_corrupt(
    value: object, dtype: object, shape: object, offsets: object, data: bytes
) -> None:
    fields = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    for header in (value, {"__metadata__": METADATA, "a": fields}, {"__metadata__": METADATA, "b": value}):
        well_formed_or_corrupt(framed(json.dumps(header), data))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.binary(max_size=80))
def test_any_bytes_give_a_page_or_are_corrupt(data: bytes) -> None:
    well_formed_or_corrupt(data)
    well_formed_or_corrupt(framed(data))


# Through a store.


def test_a_page_goes_through_a_store_and_is_aligned() -> None:
    store = MemoryStore()
    assert put_snapshot(store, "a", sample()) is True
    assert put_snapshot(store, "a", SerializedSnapshot()) is False
    found = get_snapshot(store, "a")
    assert found is not None
    same(sample(), found)
    assert all(array.ctypes.data % array.dtype.itemsize == 0 for array in found.arrays.values())
    assert min(array.ctypes.data for array in found.arrays.values() if array.size) % 64 == 0
    assert get_snapshot(store, "b") is None


def test_an_entry_that_is_no_page_is_corrupt_and_dropped() -> None:
    store = MemoryStore()
    store.put("a", [b"something else"])
    with pytest.raises(SnapshotCorruptError):
        get_snapshot(store, "a")
    assert store.stat(["a"]) == [None]


@pytest.mark.parametrize("replaced", [True, False])
def test_a_page_that_vanishes_or_is_replaced_between_two_calls_is_a_miss(
    monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    store = MemoryStore()
    put_snapshot(store, "a", sample())
    original = store.get_into

    def get_into(key: str, buffer: Any) -> bool:
        store.delete(key)
        if replaced:
            put_snapshot(store, key, SerializedSnapshot())
        return original(key, buffer)

    monkeypatch.setattr(store, "get_into", get_into)
    assert get_snapshot(store, "a") is None


# What parsing costs.


FRONT = f'{{"__metadata__":{{"format":"{SNAPSHOT_FORMAT}","meta":"'
LARGE = 1 << 20
COSTLY: dict[str, str] = {
    "a meta without an end": FRONT + "x" * LARGE,
    "a meta of escapes": FRONT + "\\\\" * (LARGE // 2),
    "brackets in a meta without an end": FRONT + "[]," * (LARGE // 3),
    "brackets": '{"a":[' + "[]," * (LARGE // 3) + "1]}",
    "nothing but quotes": '"' * LARGE,
    "numbers": '{"a":[' + "257," * (LARGE // 4) + "1]}",
    "texts": '{"a":[' + '"ab",' * (LARGE // 5) + "1]}",
    "escaped characters": '{"a":"' + "\\u00e9" * (LARGE // 6) + '"}',
    "a wide character": '{"a":"' + "x" * LARGE + '\U0001f600"}',
}


@pytest.mark.parametrize("header", COSTLY.values(), ids=COSTLY)
def test_parsing_a_header_takes_memory_in_proportion_to_its_bytes(header: str) -> None:
    data = framed(header)
    with peak_memory() as most:
        with pytest.raises(SnapshotCorruptError):
            unpack(data)
        assert most() < 32 * len(data)


@pytest.mark.parametrize("text", ["[],", "{},", '"":0,', "1.5,", '"ab",'])
def test_a_header_of_more_values_than_any_page_has_is_not_parsed(text: str) -> None:
    """Each takes up to two hundred bytes of memory."""
    data = framed(("{" if text.startswith('"":') else '{"a":[') + text * (MAX_VALUES + 1))
    with peak_memory() as most:
        with pytest.raises(SnapshotCorruptError, match=f"more than {MAX_VALUES}"):
            unpack(data)
        assert most() < 4 * len(data)


@pytest.mark.parametrize("before", range(8))
def test_depth_is_counted_across_the_parts_in_which_a_text_is_looked_at(before: int) -> None:
    """Wherever a part ends: in a text, in an escape, between brackets."""
    padding = "x" * (strict_json._PART - 8 + before)
    for depth in (98, 99):
        text = f'{{"{padding}\\\\\\"[[":{nested(depth)}}}'
        if depth == 98:
            assert strict_json.decode(text)
        else:
            with pytest.raises(ValueError, match="nested 101 deep; 100 is the limit"):
                strict_json.decode(text)


@pytest.mark.parametrize("kind", ["a name", "a dtype", "a shape"])
def test_an_error_quotes_little_of_what_it_refuses(kind: str) -> None:
    """It goes to the log."""
    text = "x" * 100_000
    entry: Any = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    changed: Any = {"a dtype": {"dtype": text}, "a shape": {"shape": [1] * 30_000}}.get(kind, {"shape": None})
    header = {"__metadata__": METADATA, text if kind == "a name" else "a": {**entry, **changed}}
    with pytest.raises(SnapshotCorruptError) as found:
        unpack(framed(header, DATA))
    assert len(str(found.value)) < 400
