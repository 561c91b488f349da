"""Traffic through the real PrefixCache, its radix tree and stores, with tiny tensors: what is found again.

Nothing of the cache is modelled: one layer of two numbers per token stands for K and V, and is written for
every token that was not found. Policies other than the shipped one replace the order in which the ledger
ranks entries, and nothing else.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

import kvcache
import ml
from benchmarks.scale_traffic import Request, Traffic, requests, system_prompts
from kvcache import Batch, PrefixCache
from kvcache.prefix.eviction_policy import PrefixEvictionPolicy
from kvcache.prefix.radix_tree import Node
from kvcache.prefix.tree_entry import TreeEntry
from kvcache.stores import MemoryStore

BYTES = 16
"""Of a token: K and V of one layer, one head of two numbers, F32."""
_LONGEST = 4096
"""Tokens of a prompt and its answer."""

Priority = Callable[[Node[TreeEntry]], Any]


def _fifo(node: Node[TreeEntry]) -> Any:
    return (False, 0.0) if node.data is None else (node.data.pins > 0, node.data.since)


def _shallowest(node: Node[TreeEntry]) -> Any:
    return (False, 0, 0) if node.data is None else (node.data.pins > 0, node.data.used, node.end)


_PINNED = 8
"""Of the most popular system prompts."""
POLICIES: dict[str, tuple[Priority | None, int]] = {
    "LRU, the deepest of equals first (shipped)": (None, 0),
    f"the same, {_PINNED} system prompts pinned": (None, _PINNED),
    "the same, all system prompts pinned": (None, sys.maxsize),
    "LRU, the shallowest of equals first": (_shallowest, 0),
    "first in, first out": (_fifo, 0),
}
"""Name -> (the ledger's order where it is not the shipped one, how many system prompts are pinned)."""


@dataclass(slots=True)
class Outcome:
    """What came of a run, in tokens of prompts."""

    requests: int = 0
    tokens: int = 0
    hits: int = 0
    remote: int = 0
    """Of the hits those that came from the shared store."""
    entries: int = 0
    """Nodes that were kept in the end; of a fleet, pages in the shared store."""
    nbytes: int = 0
    """Bytes in the shared store in the end."""

    @property
    def rate(self) -> float:
        return self.hits / max(1, self.tokens)

    def as_dict(self) -> dict[str, float]:
        return asdict(self) | {"rate": self.rate}


class Host:
    """One PrefixCache as a server has it, within ``budget`` tokens."""

    def __init__(
        self,
        backend: ml.Backend,
        budget: int | None,
        room: int,
        stores: Sequence[Any] = (),
        policy: PrefixEvictionPolicy | None = None,
    ) -> None:
        self.cache = kvcache.CausalCache()
        self.cache.init(backend, ml.DType.F32, max_sequences=1, capacity=room, max_batch=_LONGEST)
        self._backend = backend
        self.prefix = PrefixCache(
            self.cache,
            budget=None if budget is None else budget * BYTES,
            tiers=stores,
            identity={"model": "synthetic"},
            block_size=16,
            eviction_policy=policy or "lru",
        )

    def rank_by(self, priority: Priority) -> None:
        self.prefix.tree.device._priority = priority

    def serve(self, prompt: np.ndarray, answer: np.ndarray) -> int:
        """Tokens of the prompt that were found."""
        with self.prefix.begin(prompt) as session:
            found = session.cached
            self._evaluate(session.seq, found, prompt[found:])
            if answer.size:
                session.extend(answer.tolist())
                self._evaluate(session.seq, prompt.size, answer)
        return found

    def _evaluate(self, seq: int, begin: int, tokens: np.ndarray) -> None:
        with self._backend.new_context() as ctx:
            self.cache.start_forward(ctx, Batch(range(begin, begin + tokens.size), [seq] * tokens.size))
            self.cache.set_layer(0)
            key = ctx.from_numpy(np.repeat(tokens.astype(np.float32), 2).reshape(-1, 1, 2))
            self.cache.put(ctx, key, key)


@contextlib.contextmanager
def _hosts(
    count: int, budget: int | None, room: int, stores: Sequence[MemoryStore] = ()
) -> Iterator[list[Host]]:
    with contextlib.ExitStack() as stack:
        backend = stack.enter_context(ml.open_backend("numpy"))
        hosts = [Host(backend, budget, room, stores) for _ in range(count)]
        for host in hosts:
            stack.enter_context(host.prefix)
        yield hosts


def run(traffic: Traffic, stream: Sequence[Request], policy: str, budget: int | None) -> Outcome:
    """One host, ``budget`` tokens (None: no limit). System prompts are served before, and not counted."""
    priority, pinned = POLICIES[policy]
    found = Outcome()
    unique = ideal(stream)[1] + sum(prompt.size for prompt in system_prompts(traffic))
    room = (unique if budget is None else min(budget, unique)) + 2 * _LONGEST
    with _hosts(1, budget, room) as (host,):
        if priority is not None:
            host.rank_by(priority)
        for rank, prompt in reversed([*enumerate(system_prompts(traffic))]):
            host.serve(prompt, prompt[:0])
            if rank < pinned:
                host.prefix.pin(prompt)
        for request in stream:
            found.requests += 1
            found.tokens += request.prompt.size
            found.hits += host.serve(request.prompt, request.answer)
        found.entries = len(host.prefix.tree.device)
    return found


def ideal(stream: Sequence[Request], before: Sequence[np.ndarray] = ()) -> tuple[int, int]:
    """(tokens found with no limit, tokens that are new), by a plain dictionary: the reference of a run.

    A prompt's last token is always evaluated.
    """
    tree: dict[int, Any] = {}
    hits = new = 0
    for prompt in before:
        new += walk(tree, prompt.tolist())[1]
    for request in stream:
        found, fresh = walk(tree, request.prompt.tolist() + request.answer.tolist(), request.prompt.size - 1)
        hits += found
        new += fresh
    return hits, new


def walk(tree: dict[int, Any], tokens: Sequence[int], most: int = 0) -> tuple[int, int]:
    """(leading tokens that were there, ``most`` at most; tokens that are added)."""
    known = 0
    for token in tokens:
        if token not in tree:
            break
        tree = tree[token]
        known += 1
    for token in tokens[known:]:
        tree[token] = tree = {}
    return min(known, most), len(tokens) - known


def by_budget(traffic: Traffic, policy: str, shares: Sequence[float]) -> list[float]:
    """Rates of a policy within shares of all that is ever new, and with no limit."""
    stream = list(requests(traffic))
    _, new = ideal(stream, system_prompts(traffic))
    budgets = [*(int(share * new) for share in shares), None]
    return [run(traffic, stream, policy, budget).rate for budget in budgets]


@dataclass(frozen=True, slots=True)
class Fleet:
    """``hosts`` hosts, each with room for ``local`` of all that is new, over one store or none.

    A conversation's next turn goes to the host of the last one with the chance ``stays``, else to any.
    What is computed is written to the store at once. ``store`` is its budget in bytes; None: no limit, 0:
    there is no store.
    """

    hosts: int = 4
    local: float = 0.1
    stays: float = 0.0
    store: int | None = None


def serve(traffic: Traffic, fleet: Fleet) -> Outcome:
    stream = list(requests(traffic))
    _, new = ideal(stream)
    found, random = Outcome(), np.random.default_rng((traffic.seed, 3))
    store = None if fleet.store == 0 else MemoryStore(fleet.store)
    budget = int(fleet.local * new)
    at: dict[int, int] = {}
    with _hosts(fleet.hosts, budget, budget + 2 * _LONGEST, () if store is None else (store,)) as hosts:
        for request in stream:
            if request.conversation not in at or random.random() >= fleet.stays:
                at[request.conversation] = int(random.integers(fleet.hosts))
            host = hosts[at[request.conversation]]
            found.requests += 1
            found.tokens += request.prompt.size
            found.hits += host.serve(request.prompt, request.answer)
            host.prefix.flush()
        found.remote = sum(host.prefix.stats.store for host in hosts)
    if store is not None:
        usage = store.usage()
        found.entries, found.nbytes = usage.entries, usage.nbytes
    return found
