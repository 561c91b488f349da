"""The scheduler's side: which pages of a request are reused, loaded and stored.

::

    match      how many tokens the stores have beyond those of vLLM          -> lookups, by threads
    admitted   blocks were allocated: which pages to load into which of them
    plan       one step: loads of admitted requests, saves of pages that are complete when the step ends
    heard the workers' results
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

__all__ = ["Planner", "Role"]

log = logging.getLogger("kvcache")

REMEMBERED = 1 << 14
"""The number of recently stored pages to remember, which are not copied again."""
BlockIds = Callable[[str], Sequence[int]]
"""The current blocks of a request; 0 for a block that vLLM has released (outside of a window)."""


@dataclass(slots=True)
class _Tracked:
    request: Request
    keys: RequestKeys | None
    """None: the request is neither stored nor looked up."""
    done: int = 0
    """The request's pages before this one are stored, being stored, or stored by another request."""
    computed: int = 0
    """The number of tokens that vLLM itself had at the match."""
    sure_at: int = 0
    """The step from which on its tokens count as computed."""
    given_up: bool = False
    """A page could not be loaded, so the request is computed regardless of the stores."""


@dataclass(frozen=True, slots=True)
class Role:
    """What a planner does: look pages up and load them, save them, and save those of answers."""

    reads: bool = True
    writes: bool = True
    save_generated: bool = True


class Planner:
    """``block_size`` is vLLM's; ``role`` depends on vLLM's role and the connector's options."""

    def __init__(
        self,
        pages: Pages,
        block_size: int,
        lookups: Lookups,
        counters: Counters,
        role: Role,
    ) -> None:
        self._pages, self._block_size, self._lookups = pages, block_size, lookups
        self._role = role
        self._counters = counters
        self._tracked: dict[str, _Tracked] = {}
        self._loads: dict[str, list[PageLoad]] = {}
        self._writing: dict[str, tuple[str, int]] = {}
        """By a page's first key, the request that writes it, and the index of the page."""
        self._written: OrderedDict[str, None] = OrderedDict()
        self._step = self._sure_at = 0
        self._said: set[str] = set()

    # One request.

    def match(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """The number of tokens that can be loaded after the first ``computed``, and whether the load is
        asynchronous. None: a store has not answered yet. At least one token of the request remains to be
        computed.
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
        stored = self._lookups.pages(request.request_id, tokens, lambda: keys.upto(last * size))
        if stored is None and self._role.reads:
            return None, False
        tracked.done = stored or 0  # a request that loads nothing waits for no store
        if stored is not None and stored < last:  # a timeout does not show that pages are missing
            self._forget_written(keys, stored, last)
        more = tracked.done * size - computed
        return (more, True) if more > 0 and self._role.reads else (0, False)

    def admitted(self, request: Request, blocks: Sequence[int], external: int) -> None:
        """vLLM has allocated ``blocks`` for a request, of which ``external`` tokens must be loaded."""
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
        """The destinations of a page's blocks: the allocated ones of tokens [begin, end)."""
        count = self._pages.tokens // self._block_size
        indexes = range(page * count, (page + 1) * count)
        first, stop = begin // self._block_size, end // self._block_size
        return tuple((blocks[i] or None) if first <= i < stop else None for i in indexes)

    def finished(self, request: str) -> None:
        self._lookups.forget(request)
        self._tracked.pop(request, None)
        self._loads.pop(request, None)

    def reset(self) -> None:
        """Make everything stored so far unfindable."""
        self._pages.reset()
        self._written.clear()
        self._writing.clear()
        for request, tracked in self._tracked.items():
            self._lookups.forget(request)
            tracked.given_up, tracked.keys = True, None  # its tokens mix both sets of weights

    # One step.

    def plan(
        self,
        scheduled: Sequence[tuple[str, int]],
        blocks: BlockIds,
        unsure: int = 0,
        admitted: Collection[str] = (),
    ) -> Step:
        """``scheduled``: the requests of this step, and how many of their tokens are computed when it ends.
        For requests ``admitted`` in the next ``unsure`` steps, including this one, the number is not certain
        yet: pages that they complete are stored later, if vLLM still counts them as computed.
        """
        loads, self._loads = self._loads, {}
        self._step += 1
        if unsure:
            self._sure_at = max(self._sure_at, self._step + unsure)
        saves: list[PageSave] = []
        for request, computed in scheduled:
            tracked = self._tracked.get(request)
            if tracked is None or tracked.keys is None or not self._role.writes:
                continue
            if request in admitted:
                tracked.sure_at = self._sure_at
            if tracked.sure_at <= self._step:
                saves += self._due(tracked, tracked.keys, computed, blocks)
        return Step(loads, saves, idle=not scheduled)

    def _due(
        self, tracked: _Tracked, named: RequestKeys, computed: int, blocks: BlockIds
    ) -> Iterable[PageSave]:
        """The pages that are complete by now. Drafts and tokens not yet sampled are not final."""
        request, size = tracked.request, self._pages.tokens
        sure = min(computed, len(request.all_token_ids))
        if not self._role.save_generated:
            sure = min(sure, getattr(request, "num_prompt_tokens", sure))
        first, tracked.done = tracked.done, max(tracked.done, sure // size)
        if tracked.done == first:
            return
        keys, allocated = named.upto(tracked.done * size), blocks(request.request_id)
        count = size // self._block_size
        for page in range(first, tracked.done):
            own = tuple(keys[rank][page] for rank in range(self._pages.ranks))
            lie = tuple(allocated[page * count : (page + 1) * count])
            if own[0] in self._writing or own[0] in self._written or not all(lie):
                continue
            self._writing[own[0]] = request.request_id, page
            yield PageSave(own, page * size, lie)

    def heard(self, report: Report) -> None:
        """Process the workers' report."""
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
        for name in report.broken & self._tracked.keys():  # damaged pages are written again
            tracked = self._tracked[name]
            tracked.given_up, tracked.done = True, 0
            if tracked.keys is not None:
                pages = len(tracked.request.all_token_ids) // self._pages.tokens
                self._forget_written(tracked.keys, 0, pages)

    def _forget_written(self, keys: RequestKeys, first_missing: int, last: int) -> None:
        """The stores lack pages from ``first_missing`` on: those stored earlier are written again."""
        for key in keys.upto(last * self._pages.tokens)[0][first_missing:]:
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
                    log.warning("a request is neither stored nor looked up: %s", error)
            tracked = self._tracked[request.request_id] = _Tracked(request, keys)
        return tracked
