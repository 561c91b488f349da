"""What a step of the radix tree, keys and stores costs on this machine: where docs/scaling.md starts."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import ml
from benchmarks.scale_simulation import Host
from benchmarks.transfer import MIB, page, plain_socket, timed
from kvcache.prefix.radix_tree import RadixTree
from kvcache.stores import FileStore, Keys, MemoryStore, SnapshotStore
from kvcache.testing.bench.timing import Contender

_SHORT, _LONG = 16, 512
"""Tokens of the edges from which the cost of a node and of a token are told apart."""


def measure(quick: bool = False) -> dict[str, Any]:
    """All constants: seconds, bytes, bytes per second."""
    return {
        "memory": _memory(100 if quick else 1500),
        "match": _match(20 if quick else 400),
        "begin": _begin(20 if quick else 300),
        "key": _key(20 if quick else 200),
        "stores": _stores((1 if quick else 64) * MIB, 3 if quick else 9),
    }


def _line(short: float, long: float) -> tuple[float, float]:
    """(fixed cost, cost per token) from the costs of _SHORT and _LONG tokens."""
    each = max(0.0, (long - short) / (_LONG - _SHORT))
    return short - _SHORT * each, each


def _median(call: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _memory(count: int) -> dict[str, float]:
    """Bytes that a PrefixCache keeps for each node, and for each of its tokens, K and V aside."""
    used = [_kept(count, size) / count for size in (_SHORT, _LONG)]
    node, token = _line(*used)
    return {"node": node, "token": token}


def _kept(count: int, size: int) -> int:
    """What ``count`` conversations of ``size`` tokens leave behind in a cache that was in use before."""
    random = np.random.default_rng(0)
    with ml.open_backend("numpy") as backend:
        host = Host(backend, None, count * size + 2 * _LONG)
        with host.prefix:
            for warm in range(8):
                host.serve(np.full(4, warm), np.zeros(0, np.int64))
            tracemalloc.start()
            for i in range(count):
                tokens = random.integers(0, 50_000, size)
                tokens[0] = 100_000 + i
                host.serve(tokens, tokens[:0])
            found, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
    return found


def _match(rounds: int) -> dict[str, float]:
    """Seconds of a walk through the radix tree, for each node on the way and each token of its edge."""
    random = np.random.default_rng(0)
    depth = 16
    costs = []
    for size in (_SHORT, _LONG):
        radix_tree: RadixTree[None] = RadixTree()
        node = radix_tree.root
        for _ in range(depth):
            for sibling in range(64):
                edge = random.integers(0, 50_000, size)
                edge[0] = sibling
                child = radix_tree.add(node, edge)
            node = child
        tokens = node.prefix()
        costs.append(
            _median(lambda radix_tree=radix_tree, tokens=tokens: radix_tree.match(tokens), 10 * rounds)
            / depth
        )
    node_cost, token_cost = _line(*costs)
    return {"node": node_cost, "token": token_cost}


def _begin(rounds: int) -> dict[str, float]:
    """Seconds of ``begin`` and ``close``, for a prompt of 2,048 tokens in 8 turns that is on the device."""
    random = np.random.default_rng(0)
    with ml.open_backend("numpy") as backend:
        host = Host(backend, None, 16_384)
        with host.prefix:
            history = random.integers(0, 50_000, 256)
            for _ in range(7):
                host.serve(history, history[:0])
                history = np.concatenate((history, random.integers(0, 50_000, 256)))
            host.serve(history, history[:0])
            return {"found": _median(lambda: host.prefix.begin(history).close(), rounds)}


def _key(rounds: int) -> dict[str, float]:
    """Seconds of a key for each token that it names."""
    tokens, keys = np.arange(32_768), Keys({"model": "m"}, 512)
    return {"token": _median(lambda: keys.chain(tokens).aligned, rounds) / tokens.size}


def _stores(size: int, rounds: int) -> dict[str, dict[str, float]]:
    """Bytes per second of a put and a get, and seconds of ``prefix`` of 16 keys, of all stores in turn."""
    parts = page(size)
    nbytes = sum(part.nbytes for part in parts)
    buffer = np.zeros(nbytes, np.uint8)
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(plain_socket(nbytes))
        stores = dict(_opened(stack, 4 * nbytes))
        puts = {"plain TCP socket": Contender(lambda: plain.put(parts))}
        gets = {"plain TCP socket": Contender(lambda: plain.get(memoryview(buffer)))}
        for name, store in stores.items():
            puts[name] = _put(store, parts)
            gets[name] = Contender(lambda store=store: store.get_into("page", buffer))
        trials = timed({"put": puts, "get": gets}, rounds)
        found = {
            name: {op: nbytes / (trials[op].sample(name).median / 1e6) for op in trials} for name in puts
        }
        keys = [f"k{i}" for i in range(16)]
        for name, store in stores.items():
            for key in keys:
                store.put(key, [b"x"])
            found[name]["prefix"] = _median(lambda store=store: store.prefix(keys), 20 * rounds)
    return found


def _put(store: SnapshotStore, parts: Sequence[np.ndarray]) -> Contender:
    return Contender(lambda: store.put("page", parts), lambda: store.delete("page"))


def _opened(stack: contextlib.ExitStack, room: int) -> Iterator[tuple[str, SnapshotStore]]:
    """The stores that can run here."""
    from kvcache.stores import MooncakeStore, ValkeyStore
    from kvcache.testing.servers import ValkeyServer
    from tests.mooncake_pool import MooncakePool

    yield "memory", stack.enter_context(MemoryStore())
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    yield "file", stack.enter_context(FileStore(Path(folder) / "store", durable=False))
    if ValkeyServer.program() is not None:
        server = stack.enter_context(ValkeyServer())
        yield "Valkey", stack.enter_context(ValkeyStore(server.url))
    if MooncakePool.missing() is None:
        pool = stack.enter_context(MooncakePool())
        pool.add_host(room + 64 * MIB)
        yield "Mooncake", stack.enter_context(MooncakeStore(pool.url))
