"""The radix tree of prefixes against a set of tuples."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from kvcache import InvalidRangeError
from kvcache.prefix.alphabet import Alphabet
from kvcache.prefix.radix_tree import Node, RadixTree, common_length


def ids(tokens: Iterable[int]) -> np.ndarray:
    return np.array([*tokens], dtype=np.int64)


class Naive:
    """The ends of all nodes, as tuples of tokens, each with its data."""

    def __init__(self) -> None:
        self.ends: dict[tuple[int, ...], str | None] = {}

    def match(self, tokens: Sequence[int]) -> int:
        whole = tuple(tokens)
        return max(
            (
                size
                for size in range(len(whole) + 1)
                if any(end[:size] == whole[:size] for end in self.ends) or not size
            ),
            default=0,
        )


def check(radix_tree: RadixTree[str], naive: Naive) -> None:
    nodes = list(radix_tree)
    assert {tuple(node.prefix().tolist()): node.data for node in nodes} == naive.ends
    assert len(nodes) == len(naive.ends) == len(radix_tree)
    for node in nodes:
        assert node.parent is not None
        assert node.begin == node.parent.end
        assert node.end == len(node.prefix()) == node.begin + node.tokens.size > node.begin
        assert node.parent.children[int(node.tokens[0])] is node
        assert [other.end for other in node.path()] == sorted({other.end for other in node.path()})
        assert node.path()[-1] is node


def test_any_changes_agree_with_a_set_of_tuples() -> None:
    for seed in range(150):
        rnd = random.Random(seed)
        radix_tree: RadixTree[str] = RadixTree()
        naive = Naive()
        for step in range(rnd.randrange(3, 40)):
            tokens = rnd.choices(range(2 + seed % 3), k=rnd.randrange(10))
            match = radix_tree.match(ids(tokens))
            assert match.length == naive.match(tokens)
            assert match.inside == (bool(match.nodes) and match.length < match.nodes[-1].end)
            change(rnd, radix_tree, naive, tokens, f"data {step}")
            check(radix_tree, naive)


def change(
    rnd: random.Random, radix_tree: RadixTree[str], naive: Naive, tokens: list[int], data: str
) -> None:
    match = radix_tree.match(ids(tokens))
    node = match.nodes[-1] if match.nodes else radix_tree.root
    roll = rnd.random()
    if roll < 0.6:
        if match.inside:
            node = radix_tree.split(node, match.length)
            assert node.data is None
            naive.ends[tuple(tokens[: match.length])] = None
        if match.length < len(tokens):
            added = radix_tree.add(node, ids(tokens[match.length :]), data)
            assert added.end == len(tokens)
            naive.ends[tuple(tokens)] = data
    elif roll < 0.8 and match.nodes:
        below = tuple(node.prefix().tolist())
        radix_tree.remove(node)
        naive.ends = {end: kept for end, kept in naive.ends.items() if end[: len(below)] != below}
    elif len(node.children) == 1 and node.parent is not None:
        (child,) = node.children.values()
        gone = tuple(node.prefix().tolist())
        assert radix_tree.join(node) is child
        del naive.ends[gone]


def test_a_walk_names_the_nodes_on_its_way() -> None:
    radix_tree: RadixTree[str] = RadixTree()
    whole = radix_tree.add(radix_tree.root, ids(range(8)), "whole")
    upper = radix_tree.split(whole, 3)
    other = radix_tree.add(upper, ids([9, 9]), "other")
    assert [*radix_tree] == [upper, *sorted((whole, other), key=lambda node: node.data == "whole")]
    for tokens, nodes, length in (
        ([], [], 0),
        ([7], [], 0),
        ([0, 1], [upper], 2),
        ([0, 1, 2], [upper], 3),
        ([0, 1, 2, 9], [upper, other], 4),
        ([0, 1, 2, 9, 9, 9], [upper, other], 5),
        (range(20), [upper, whole], 8),
    ):
        match = radix_tree.match(ids(tokens))
        assert (match.nodes, match.length) == (nodes, length)
    assert (whole.data, whole.begin, whole.end, whole.tokens.tolist()) == ("whole", 3, 8, [3, 4, 5, 6, 7])


def test_an_edge_keeps_no_hold_of_what_it_was_made_of() -> None:
    radix_tree: RadixTree[str] = RadixTree()
    tokens = ids(range(6))
    node = radix_tree.add(radix_tree.root, tokens)
    tokens[:] = 0
    assert node.prefix().tolist() == [0, 1, 2, 3, 4, 5]
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


@pytest.mark.parametrize("sizes", [(0, 0), (0, 3), (5, 5), (5, 9), (9, 5)])
def test_common_length(sizes: tuple[int, int]) -> None:
    one, other = (ids(range(size)) for size in sizes)
    assert common_length(one, other) == min(sizes)
    for at in range(min(sizes)):
        changed = other.copy()
        changed[at] = 99
        assert common_length(one, changed) == common_length(changed, one) == at


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


def test_an_array_of_ids_is_copied() -> None:
    tokens = ids([1, 2])
    codes = Alphabet().encode(tokens)
    tokens[0] = 9
    assert codes.tolist() == [1, 2]


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
    with pytest.raises(InvalidRangeError, match="tokens: "):
        alphabet.encode(tokens)  # type: ignore[arg-type]


def test_a_path_of_many_nodes_is_walked_whole() -> None:
    radix_tree: RadixTree[str] = RadixTree()
    node: Node[str] = radix_tree.root
    for i in range(3000):
        node = radix_tree.add(node, ids([i % 7]))
    assert radix_tree.match(ids(i % 7 for i in range(4000))).length == 3000
    assert len(node.path()) == len(radix_tree) == 3000
