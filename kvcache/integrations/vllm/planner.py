"""The scheduler's side: which pages a request starts from, which are loaded, and which are stored.

::

    match      how many tokens the stores have behind what vLLM has          -> lookups, by threads
    admitted   blocks were allocated: what is to be loaded into which of them
    plan       one step: loads of admitted requests, saves of pages that are whole when the step ends
    heard      what became of them
    finished   the request has ended, or was aborted

Everything here is bookkeeping; ``Step`` carries it to the workers.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from kvcache.cache import NotSupportedError
from kvcache.integrations.vllm.counters import Counters
from kvcache.integrations.vllm.lookups import Lookups
from kvcache.integrations.vllm.naming import Pages, Request, RequestKeys
from kvcache.integrations.vllm.steps import PageLoad, PageSave, Report, Step

__all__ = ["Planner"]

log = logging.getLogger("kvcache")

REMEMBERED = 1 << 14
"""Pages that were stored a while ago, which are not copied out again."""
BlockIds = Callable[[str], Sequence[int]]
"""The blocks of a request now; 0 where vLLM has let one go (a window has passed it)."""


@dataclass(slots=True)
class _Tracked:
    request: Request
    keys: RequestKeys | None
    """None: it is not stored and not looked up."""
    done: int = 0
    """Its pages before this one are stored, or on their way, or somebody else's to store."""
    computed: int = 0
    """What vLLM itself had when it was matched."""
    sure_at: int = 0
    """The step from which on what it has counts as computed."""
    given_up: bool = False
    """A page of it could not be loaded: it is computed now, whatever the stores say."""


class Planner:
    """``block_size`` is vLLM's; ``reads`` and ``writes`` say what its role allows."""

    def __init__(
        self,
        pages: Pages,
        block_size: int,
        lookups: Lookups,
        counters: Counters,
        reads: bool = True,
        writes: bool = True,
        save_generated: bool = True,
    ) -> None:
        self._pages, self._block_size, self._lookups = pages, block_size, lookups
        self._reads, self._writes, self._save_generated = reads, writes, save_generated
        self._counters = counters
        self._tracked: dict[str, _Tracked] = {}
        self._loads: dict[str, list[PageLoad]] = {}
        self._writing: dict[str, tuple[str, int]] = {}
        """By a page's first key the request that writes it, and which of its pages it is."""
        self._written: OrderedDict[str, None] = OrderedDict()
        self._step = self._sure_at = 0
        self._said: set[str] = set()

    # One request.

    def match(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded behind the first ``computed``; whether that goes on between steps.

        None: a store has not answered yet. At least one token of the request is left to compute.
        """
        tracked = self._track(request)
        tracked.computed = computed
        size, tokens = self._pages.tokens, len(request.all_token_ids)
        last = (tokens - 1) // size
        keys = tracked.keys
        if keys is None or tracked.given_up or last * size <= computed:
            if not tracked.given_up:
                tracked.done = max(tracked.done, computed // size)
            return 0, False
        found = self._lookups.pages(request.request_id, tokens, lambda: keys.upto(last * size))
        if found is None and self._reads:
            return None, False
        tracked.done = found or 0  # a request that reads nothing waits for no store
        if found is not None and found < last:  # no answer says nothing of what they lack
            self._forget_written(keys, found, last)
        more = tracked.done * size - computed
        return (more, True) if more > 0 and self._reads else (0, False)

    def admitted(self, request: Request, blocks: Sequence[int], external: int) -> None:
        """vLLM has given ``blocks`` to a request, of which ``external`` tokens are to be loaded."""
        self._lookups.forget(request.request_id)
        if not external:
            return
        tracked, size = self._tracked[request.request_id], self._pages.tokens
        assert tracked.keys is not None
        begin, end = tracked.computed, tracked.computed + external
        keys = tracked.keys.upto(-(-end // size) * size)
        first = begin // size
        self._counters.add("tokens_found", external)
        self._loads[request.request_id] = [
            PageLoad(tuple(own[page] for own in keys), page * size, self._targets(blocks, page, begin, end))
            for page in range(first, -(-end // size))
        ]

    def _targets(self, blocks: Sequence[int], page: int, begin: int, end: int) -> tuple[int | None, ...]:
        """Where a page's blocks go: those of tokens [begin, end) that vLLM has allocated."""
        count = self._pages.tokens // self._block_size
        indexes = range(page * count, (page + 1) * count)
        first, stop = begin // self._block_size, end // self._block_size
        return tuple((blocks[i] or None) if first <= i < stop else None for i in indexes)

    def finished(self, request: str) -> None:
        self._lookups.forget(request)
        self._tracked.pop(request, None)
        self._loads.pop(request, None)

    def reset(self) -> None:
        """Find nothing again of what was stored so far."""
        self._pages.reset()
        self._written.clear()
        self._writing.clear()
        for request, tracked in self._tracked.items():
            self._lookups.forget(request)
            tracked.given_up, tracked.keys = True, None  # what it has computed is of both

    # One step.

    def plan(
        self,
        scheduled: Sequence[tuple[str, int]],
        blocks: BlockIds,
        unsure: int = 0,
        admitted: Collection[str] = (),
    ) -> Step:
        """``scheduled``: requests of this step, and how many of their tokens are computed when it ends.

        For the next ``unsure`` steps, this one included, it is not known yet whether that is so of those that
        are ``admitted`` in them: what they make whole is stored later, if vLLM still has it as computed.
        """
        loads, self._loads = self._loads, {}
        self._step += 1
        if unsure:
            self._sure_at = max(self._sure_at, self._step + unsure)
        saves: list[PageSave] = []
        for request, computed in scheduled:
            tracked = self._tracked.get(request)
            if tracked is None or tracked.keys is None or not self._writes:
                continue
            if request in admitted:
                tracked.sure_at = self._sure_at
            if tracked.sure_at <= self._step:
                saves += self._due(tracked, tracked.keys, computed, blocks)
        return Step(loads, saves, idle=not scheduled)

    def _due(
        self, tracked: _Tracked, named: RequestKeys, computed: int, blocks: BlockIds
    ) -> Iterable[PageSave]:
        """The pages that are whole by now. Of drafts and tokens still to be sampled nothing is final."""
        request, size = tracked.request, self._pages.tokens
        sure = min(computed, len(request.all_token_ids))
        if not self._save_generated:
            sure = min(sure, getattr(request, "num_prompt_tokens", sure))
        first, tracked.done = tracked.done, max(tracked.done, sure // size)
        if tracked.done == first:
            return
        keys, held = named.upto(tracked.done * size), blocks(request.request_id)
        count = size // self._block_size
        for page in range(first, tracked.done):
            own = tuple(keys[rank][page] for rank in range(self._pages.ranks))
            lie = tuple(held[page * count : (page + 1) * count])
            if own[0] in self._writing or own[0] in self._written or not all(lie):
                continue
            self._writing[own[0]] = request.request_id, page
            yield PageSave(own, page * size, lie)

    def heard(self, report: Report) -> None:
        """What the workers say of what they were given."""
        for key in report.postponed:
            request, page = self._writing.pop(key, ("", 0))
            if request in self._tracked:
                self._tracked[request].done = min(self._tracked[request].done, page)
        for key in report.stored | report.failed:
            self._writing.pop(key, None)
        for key in report.stored:
            self._written[key] = None
            self._written.move_to_end(key)
        for key in report.failed | report.postponed:
            self._written.pop(key, None)
        while len(self._written) > REMEMBERED:
            self._written.popitem(last=False)
        for name in report.broken & self._tracked.keys():  # what was damaged is written again
            tracked = self._tracked[name]
            tracked.given_up, tracked.done = True, 0
            if tracked.keys is not None:
                pages = len(tracked.request.all_token_ids) // self._pages.tokens
                self._forget_written(tracked.keys, 0, pages)

    def _forget_written(self, keys: RequestKeys, found: int, last: int) -> None:
        """The stores lack pages from ``found`` on: those that they once had are written again."""
        for key in keys.upto(last * self._pages.tokens)[0][found:]:
            self._written.pop(key, None)

    def _track(self, request: Request) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.request is not request:
            keys = None
            try:
                keys = self._pages.of(request)
            except NotSupportedError as error:
                if str(error) not in self._said:
                    self._said.add(str(error))
                    log.warning("a request is not stored and not looked up: %s", error)
            tracked = self._tracked[request.request_id] = _Tracked(request, keys)
        return tracked
