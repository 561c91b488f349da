"""What the radix tree of prefixes keeps and refuses, and how items become tokens."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

import ml
from kvcache import InvalidRangeError
from kvcache.prefix.alphabet import Alphabet
from kvcache.prefix.radix_tree import Node, RadixTree


def ids(tokens: Iterable[int]) -> np.ndarray:
    return np.array([*tokens], dtype=np.int64)


def test_edges_and_codes_keep_no_hold_of_what_they_were_made_of() -> None:
    radix_tree: RadixTree[str] = RadixTree()
    tokens = ids(range(6))
    node, codes = radix_tree.add(radix_tree.root, tokens), Alphabet().encode(tokens)
    tokens[:] = 0
    assert node.prefix().tolist() == codes.tolist() == [0, 1, 2, 3, 4, 5]
    long = radix_tree.add(radix_tree.root, ids(range(100, 2000)))
    upper = radix_tree.split(long, 1000)
    assert upper.tokens.base is None
    assert long.tokens.base is None


def test_what_means_nothing_is_refused() -> None:
    radix_tree: RadixTree[str] = RadixTree()
    node = radix_tree.add(radix_tree.root, ids([1, 2, 3]))
    for call in (
        lambda: radix_tree.add(radix_tree.root, ids([1, 5])),
        lambda: radix_tree.add(radix_tree.root, ids([])),
        lambda: radix_tree.split(node, 0),
        lambda: radix_tree.split(node, 3),
        lambda: radix_tree.split(radix_tree.root, 0),
        lambda: radix_tree.remove(radix_tree.root),
        lambda: radix_tree.join(radix_tree.root),
        lambda: radix_tree.join(node),
    ):
        with pytest.raises(ValueError, match=r".+"):
            call()
    assert [*radix_tree] == [node]


def test_a_walk_may_begin_where_its_tokens_are_known_to_lead() -> None:
    radix_tree: RadixTree[str] = RadixTree()
    above = radix_tree.add(radix_tree.root, ids([1, 2, 3]))
    below = radix_tree.add(above, ids([4, 5, 6]))
    for more, nodes, length in (([4, 5, 6, 7], [below], 6), ([4, 9], [below], 4), ([9], [], 3), ([], [], 3)):
        tokens = ids([1, 2, 3, *more])
        for found, expected in (
            (radix_tree.match(tokens, above), nodes),
            (radix_tree.match(tokens), [above, *nodes]),
        ):
            assert (found.nodes, found.length) == (expected, length)


def test_items_get_numbers_that_are_no_ids() -> None:
    alphabet = Alphabet()
    tokens = [5, b"a cat", 0, b"a dog", b"a cat", b"", 2**63 - 1]
    codes = alphabet.encode(tokens)
    assert codes.dtype == np.int64
    assert codes.tolist() == [5, -1, 0, -2, -1, -3, 2**63 - 1]
    assert alphabet.decode(codes) == tokens
    assert alphabet.decode(alphabet.encode([bytearray(b"a dog"), np.int32(7)])) == [b"a dog", 7]
    for dtype in (np.int64, np.int32, np.uint8, np.uint64):
        assert alphabet.decode(alphabet.encode(np.array([3, 4], dtype))) == [3, 4]
    assert Alphabet().decode(ids([1, 2])) == [1, 2]


@pytest.mark.parametrize(
    "tokens",
    [
        [-1],
        [b"x", -1],
        [2**63],
        [b"x", 2**63],
        [1.0],
        ["a"],
        [None],
        [[1]],
        np.zeros(2),
        np.array([-1]),
        np.array([2**63], np.uint64),
        b"12",
        "12",
        12,
        None,
        iter([1, 2]),
    ],
    ids=lambda tokens: (
        f"{type(tokens).__name__} {tokens}" if hasattr(tokens, "__len__") else type(tokens).__name__
    ),
)
def test_what_is_no_token_is_refused(tokens: object) -> None:
    alphabet = Alphabet()
    with pytest.raises(InvalidRangeError, match="encode: token"):
        alphabet.encode(tokens)  # type: ignore[arg-type]


def test_an_id_that_is_too_large_and_a_tensor_are_named(numpy_backend: ml.Backend) -> None:
    alphabet = Alphabet()
    for tokens in ([7, 2**63], np.array([7, 2**63], np.uint64), np.array([[7, 2**63]], np.uint64)):
        with pytest.raises(InvalidRangeError, match=r"encode: token.*2\*\*63"):
            alphabet.encode(tokens)
    assert alphabet.encode(np.array([2**63 - 1], np.uint64)).tolist() == [2**63 - 1]
    with pytest.raises(InvalidRangeError, match=r"it must be a sequence of ids.*pass its \['input_ids'\]"):
        alphabet.encode({"input_ids": [1, 2]})  # type: ignore[arg-type]
    with pytest.raises(InvalidRangeError, match=r"encode: tokens=<NumpyTensor .*; it must be a sequence"):
        alphabet.encode(numpy_backend.new_context().from_numpy([1, 2]))  # type: ignore[arg-type]


def test_a_path_of_many_nodes_is_walked_whole() -> None:
    radix_tree: RadixTree[str] = RadixTree()
    node: Node[str] = radix_tree.root
    for i in range(3000):
        node = radix_tree.add(node, ids([i % 7]))
    assert radix_tree.match(ids(i % 7 for i in range(4000))).length == 3000
    assert len(node.path()) == len(radix_tree) == 3000
