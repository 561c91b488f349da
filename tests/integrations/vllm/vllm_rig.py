"""vLLM's scheduler and cache as plain as they can be, around our two sides: no vLLM, no PyTorch.

A block's content is a number for each token, made of all tokens up to it and of the salt: what the model's
K and V would be. A pass fills in what is missing, and checks all that it reads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

import ml
from kvcache.integrations.vllm.counters import Counters
from kvcache.integrations.vllm.lookups import Lookups, stored_pages
from kvcache.integrations.vllm.naming import Pages
from kvcache.integrations.vllm.pages import TokenPages
from kvcache.integrations.vllm.planner import Planner, Role
from kvcache.integrations.vllm.steps import Report, Step
from kvcache.integrations.vllm.transfers import Transfers
from kvcache.integrations.vllm.work import Workers
from kvcache.prefix.tiers import StoreTier
from kvcache.stores import SnapshotStore

BLOCK, PAGE = 4, 8
SETTINGS = {"kind": "CausalCache", "dtype": "F32"}


@dataclass
class Request:
    """What our side reads of vLLM's request, and what the scheduler here keeps of it."""

    request_id: str
    all_token_ids: list[int]
    answer: int
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: Sequence[Any] = ()
    prompt_embeds: Any = None
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    state: str = "waiting"

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.all_token_ids)
        self.wanted = self.num_prompt_tokens + self.answer


def content(request: Request, position: int) -> float:
    """Of the K and V of one token: 24 bits of a digest, which float32 holds."""
    named = repr((request.cache_salt or "", request.all_token_ids[: position + 1])).encode()
    return float(int.from_bytes(hashlib.sha256(named).digest()[:3], "big"))


class Blocks:
    """A rank's device: (blocks, tokens) of K, other ones for each rank; V is the same but negative."""

    def __init__(self, count: int, rank: int = 0) -> None:
        self.factor, self.pages = 1 + rank, token_pages()
        self.held = np.full((count, BLOCK), np.nan, np.float32)
        self.gathered = 0
        self.late: list[Callable[[], object]] = []
        """What the device was given, and does when somebody waits for it."""

    def follow(self) -> None:
        while self.late:
            self.late.pop(0)()

    def gather(self, blocks: Sequence[int]) -> Any:
        key = self.held[[*blocks]].reshape(-1, 1, 1)
        self.gathered += 1
        return SimpleNamespace(arrays=[key, -key], ready=lambda: True)

    def scatter(self, blocks: Sequence[int | None], arrays: Sequence[np.ndarray]) -> None:
        key, value = arrays
        assert np.array_equal(key, -value)
        for i, block in enumerate(blocks):
            if block is not None:
                self.held[block] = key[i * BLOCK : (i + 1) * BLOCK, 0, 0]


def token_pages() -> TokenPages:
    return TokenPages(PAGE, ml.DType.F32, (((1, 1), (1, 1)),))


class Engine:
    """One process: scheduler and ranks in turn, as vLLM's engine calls them.

    ``ranks`` have caches of their own.
    """

    def __init__(
        self,
        stores: Sequence[SnapshotStore],
        blocks: int = 40,
        chunk: int = 12,
        ranks: int = 1,
        backlog: int = 1 << 20,
        wait: float = 5.0,
        **options: Any,
    ) -> None:
        self.counters = Counters()
        self.tier = StoreTier(stores, backlog)
        lookups = Lookups(
            lambda keys: stored_pages(self.tier, keys), Workers("lookup", 1), wait, 10.0, self.counters
        )
        self.pages = Pages({"model": "m"}, SETTINGS, PAGE, ranks)
        self.planner = Planner(self.pages, BLOCK, lookups, self.counters, Role(**options))
        self.devices = [Blocks(blocks, rank) for rank in range(ranks)]
        self.tiers = [StoreTier(stores, backlog) for _ in range(ranks)]
        self.transfers = [
            Transfers(rank, device, tier, Workers("load", 2), self.counters, 0.0)
            for rank, (device, tier) in enumerate(zip(self.devices, self.tiers, strict=True))
        ]
        self.free = [*range(1, blocks)]
        self.requests: list[Request] = []
        self.dying: dict[str, Request] = {}
        """Ended while they were loaded: their blocks are not free yet."""
        self.ended: set[str] = set()
        self.arrived: dict[str, int] = {}
        self.chunk = chunk
        self.computed = 0
        """Tokens that went through the model."""

    # The scheduler.

    def add(self, request: Request) -> None:
        self.requests.append(request)

    def admit(self, request: Request) -> None:
        """Ask for external tokens, and allocate; as vLLM does with a request that has nothing computed."""
        if request.computed == 0 and not request.blocks:
            more, later = self.planner.match(request, 0)
            if more is None:
                return
            assert 0 <= more < len(request.all_token_ids)
            assert more % BLOCK == 0
            assert later == (more > 0)
            if len(self.free) < self.reserved() + -(-request.wanted // BLOCK):
                return
            self.allocate(request, more)
            self.planner.admitted(request, request.blocks, more)
            if more:
                request.computed, request.state = more, "loading"
                return
        else:
            self.planner.admitted(request, request.blocks, 0)
        request.state = "running"

    def reserved(self) -> int:
        """Blocks that those need until they end which are admitted: nobody waits for another for ever."""
        held = [one for one in self.requests if one.state != "waiting" or one.blocks]
        return sum(-(-one.wanted // BLOCK) - len(one.blocks) for one in held)

    def allocate(self, request: Request, tokens: int) -> None:
        for _ in range(-(-tokens // BLOCK) - len(request.blocks)):
            request.blocks.append(self.free.pop(0))

    def release(self, request: Request) -> None:
        """Its blocks are anybody's now: what was in them is gone."""
        for block in request.blocks:
            for device in self.devices:
                device.held[block] = np.nan
        self.free += request.blocks
        request.blocks = []

    def preempt(self, request: Request) -> None:
        self.release(request)
        request.computed, request.state = 0, "waiting"

    def finish(self, request: Request) -> None:
        self.requests.remove(request)
        self.planner.finished(request.request_id)
        self.ended.add(request.request_id)
        if request.state == "loading":
            self.dying[request.request_id] = request
        else:
            self.release(request)

    # One step.

    def step(self) -> None:
        scheduled: list[tuple[Request, int]] = []
        for request in [*self.requests]:
            if request.state == "waiting":
                self.admit(request)
            if request.state != "running":
                continue
            count = min(self.chunk, len(request.all_token_ids) - request.computed)
            self.allocate(request, request.computed + count)
            scheduled.append((request, count))
        tables = {request.request_id: request.blocks for request, _ in scheduled}
        plan = self.planner.plan(
            [(one.request_id, one.computed + count) for one, count in scheduled], lambda name: tables[name]
        )
        for request, count in scheduled:
            self.forward(request, count)
        self.workers(plan)

    def forward(self, request: Request, count: int) -> None:
        for device in self.devices:
            for position in range(request.computed + count):
                place = request.blocks[position // BLOCK], position % BLOCK
                expected = device.factor * content(request, position)
                if position >= request.computed:
                    device.held[place] = expected
                assert device.held[place] == expected, (request.request_id, position)
        self.computed += count
        request.computed += count

    def workers(self, plan: Step) -> None:
        ended, self.ended = self.ended, set()
        invalid: set[int] = set()
        reports: list[Report] = []
        for one in self.transfers:
            one.save(plan)
            one.load(plan)
            for name in one.arrived(ended, plan.idle):
                self.arrived[name] = self.arrived.get(name, 0) + 1
            invalid |= one.invalid_blocks()
            if (report := one.report()) is not None:
                reports.append(report)
        for request in self.requests:
            self.invalidate(request, invalid)
        for report in reports:
            self.planner.heard(report)
        for name in [name for name, count in self.arrived.items() if count == len(self.transfers)]:
            del self.arrived[name]
            if name in self.dying:
                self.release(self.dying.pop(name))
                continue
            request = next(one for one in self.requests if one.request_id == name)
            assert request.state == "loading"
            request.state = "waiting"
            if not request.computed:
                self.release(request)
        for request in [*self.requests]:
            if request.state == "running" and request.computed == len(request.all_token_ids):
                if len(request.all_token_ids) >= request.wanted:
                    self.finish(request)
                else:
                    request.all_token_ids.append(int(content(request, request.computed - 1)) % 50)

    def invalidate(self, request: Request, invalid: set[int]) -> None:
        """What a load has not brought is computed: from the first block on that is not there."""
        if request.state == "loading":
            bad = [i for i, block in enumerate(request.blocks) if block in invalid]
            if bad:
                request.computed = min(request.computed, bad[0] * BLOCK)

    def run(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.requests and not self.dying:
                return
            self.step()
        raise AssertionError("the requests do not end")

    def close(self) -> None:
        for one in self.transfers:
            one.close()
            if (report := one.report()) is not None:
                self.planner.heard(report)
        self.tier.close()


def entries(store: SnapshotStore, pages: Pages, request: Request) -> Iterator[list[bool]]:
    """By rank which pages of a request are stored."""
    for keys in pages.keys(request, len(request.all_token_ids)):
        yield [stat is not None for stat in store.stat(keys)]
