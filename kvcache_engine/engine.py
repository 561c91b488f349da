"""Continuous batching: requests come and go at any time, and never recompute prefixes that the PrefixCache
has.

After the iteration-level scheduling of Orca (Yu et al., 2022). A request is submitted, waits for a free
sequence, and then takes part in the forward passes that ``step`` makes, one each::

    engine = Engine(model, tokenizer)
    handle = engine.submit("And God said", GenerationOptions(max_new_tokens=8))
    while engine.busy:
        for event in engine.step():
            ...                                  # Started, Prefilled, Token, Finished, Failed

A pass has the next token of every answer and, in what room is left, chunks of prompts, as with Sarathi-Serve
(Agrawal et al., 2024): answers do not wait for long prompts, and weights are read once for both. If the cache
is full, the latest request is preempted and continued later from its kept snapshots.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike
from typing import Any, Literal, overload

import ml
from kvcache import (
    BreakEven,
    HostTier,
    PrefixCache,
    PrefixOptions,
    Retention,
    Session,
    Tenant,
    Turns,
    in_turn,
)
from kvcache.cache import (
    CacheFullError,
    ClosedError,
    InvalidRangeError,
    SequenceLostError,
    SnapshotCache,
)
from kvcache.stores import Closing, SnapshotStore
from kvcache_engine.consensus import Agreement
from kvcache_engine.drafts import Draft, DraftsInCache
from kvcache_engine.errors import ModelError, RequestError, RunnerError
from kvcache_engine.fingerprint import model_identity
from kvcache_engine.language_model import (
    LanguageModel,
    Prompt,
    cache_for,
    encode_prompt,
    settings_for,
    start_pass,
)
from kvcache_engine.memory import cache_bytes, check_memory
from kvcache_engine.options import EngineOptions
from kvcache_engine.request_state import RequestState, has_token
from kvcache_engine.requests import Event, Finished, GenerationOptions, Prefilled, Statistics, Token
from kvcache_engine.sampling import Choice, Chosen
from kvcache_engine.scheduler import (
    Branch,
    Failed,
    Part,
    Request,
    chunks,
    inputs_of,
    plan_sharing,
    worth_waiting,
)
from kvcache_engine.streaming import Listener, Streams
from kvcache_engine.tokenizer import Tokenizer
from kvcache_engine.verification import Speculation, Verifier, accept

log = logging.getLogger("kvcache")

__all__ = ["Engine", "EngineEvent", "EngineOptions", "Failed", "Request", "Tier"]

EngineEvent = Event | Failed
Tier = HostTier | SnapshotStore | str | PathLike[str]


def _check_given(model: object, tokenizer: object, options: object) -> None:
    """Refuse another runtime's model and tokenizer, which the engine cannot call, and invalid options."""
    if lacking := [name for name in ("backend", "config", "forward") if not hasattr(model, name)]:
        raise ModelError(
            f"Engine: model: a {type(model).__name__} has no {lacking[0]}; pass a model of transformers as "
            "TransformersModel(model), one of mlx-lm as MLXModel(model, config)"
        )
    if tokenizer is not None and not all(hasattr(tokenizer, name) for name in ("encode", "decode", "stream")):
        raise ModelError(
            f"Engine: tokenizer: a {type(tokenizer).__name__} cannot stream; it must be a "
            "kvcache_engine.Tokenizer: Tokenizer.load(folder)"
        )
    if not isinstance(options, EngineOptions | None):
        raise RequestError(f"Engine: options={options!r:.60}; it must be EngineOptions(...)")


def _has_stores(tiers: object) -> bool:
    """Whether ``tiers`` has stores; False for values that PrefixCache refuses."""
    return isinstance(tiers, Sequence) and any(not isinstance(tier, HostTier) for tier in tiers)


class Engine(Closing):
    """Generates text for requests that arrive at any time. A context manager.

    Any thread may call it. One call runs at a time (a ``step`` is one pass), and the others wait in the order
    of their arrival. Each event is returned once, by the next ``step``; ``complete`` leaves the events of
    other requests to it. Hold ``lock`` over calls that belong together.

    ``tiers``: where snapshots go if the device has no room, as for PrefixCache. Processes with the same
    weights share a store among them; ``identity`` identifies the weights (None: a digest of the files that
    the model was loaded from, computed only if there is a store). For a model that is split over ranks,
    "tensor_parallel" is added to it if missing, since each rank has its own heads. ``cache`` is a fresh cache
    with snapshots, which the engine binds and closes (None: one for the model's layers).

    After every call, even one that raises, exactly one session is open per running request.

    Raises CapacityError, before anything is allocated, if the cache does not fit in memory.

    >>> import ml
    >>> from kvcache_engine import Engine, GenerationOptions, Tokenizer, bundled_model, load_model
    >>> name = bundled_model()
    >>> with ml.open_backend("numpy") as backend:
    ...     with Engine(load_model(name, backend), Tokenizer.load(name)) as engine:
    ...         request = engine.submit("And God said", GenerationOptions(max_new_tokens=4))
    ...         while engine.busy:
    ...             for event in engine.step():
    ...                 pass                             # Started, Prefilled, Token, Finished, Failed
    ...         len(request.answer.tokens)
    4
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer | None = None,
        options: EngineOptions | None = None,
        tiers: Sequence[Tier] = (),
        identity: Mapping[str, Any] | None = None,
        cache: SnapshotCache | None = None,
    ) -> None:
        _check_given(model, tokenizer, options)
        self.options = options = options or EngineOptions()
        self.model = model
        self.tokenizer = tokenizer
        self.ranks = Agreement(model)
        """Agreement with the other ranks, if the model is split over several."""
        self.limit = options.context_for(model.config)
        """The most tokens of one request, prompt and answer together."""
        sizes = options.cache_sizes(model.config)
        check_memory(model.config, model.backend, *sizes)
        self.cache_bytes = cache_bytes(
            model.config, *sizes, options.largest_batch, getattr(model, "dtype", ml.DType.F32)
        )
        """Bytes of the cache once its buffers are allocated, which is at the first token."""
        share = getattr(model, "share", None)
        if share is not None and isinstance(identity, Mapping) and identity:
            identity = {"tensor_parallel": share.name, **identity}
        self._identity = identity
        stores = _has_stores(tiers)
        identity = self.identity if stores else identity
        bound: Any = cache_for(model) if cache is None else cache
        if options.batch_invariant:
            asked = getattr(model.backend, "cache_config", ml.CacheConfig)()
            bound.set_config(replace(asked, batch_invariant=True))
        bound.init(model.backend, *sizes, options.largest_batch)
        self.cache = bound
        budget = 2 * self.cache_bytes if options.budget is None else options.budget
        try:
            self.prefix = PrefixCache(
                self.cache,
                budget,
                tiers,
                identity=identity,
                block_size=options.block_size,
                options=PrefixOptions(
                    interval=options.interval,
                    layers=model.config.cached_layers,
                    tenant_budget=options.tenant_budget,
                    break_even=BreakEven(always=options.fetch == "always"),
                    read_ahead=options.read_ahead,
                    backlog=options.backlog,
                    write_through=options.write_through,
                    whole_blocks=options.batch_invariant,
                ),
            )
        except BaseException:
            self.cache.close()
            raise
        self.lock = Turns(getattr(bound, "take_over", lambda: None))
        """Held by the thread whose call is running."""
        self._listeners: dict[int, Listener] = {}
        """For each request, the listener that receives its events instead of the caller of ``step``."""
        self._streams = Streams(self)
        self._verifier = Verifier(self.cache, options, model.config.vocab_size)
        self.draft: Draft | None = None
        """The draft for requests without their own."""
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._full = False
        self._turn = 0
        """The number of passes with a single request."""
        self._computed_by: list[Any] = []
        """The variant of the model after the last pass, once a request that has ended asked for it."""
        self.closed = False
        self.reset()

    @in_turn
    def reset(self) -> None:
        """Reset counts and request numbers, and discard pending events. Only while the engine is not busy."""
        self._events: list[EngineEvent] = []
        """Events from before a failed pass, which the next ``step`` or ``take_events`` returns."""
        self.statistics = Statistics()
        self.preemptions = 0
        """How often a request was preempted."""
        self._submitted = 0
        self._listeners.clear()
        self._verifier.speculation = Speculation()

    @property
    def speculation(self) -> Speculation:
        """Counts of drafted and accepted tokens."""
        return self._verifier.speculation

    @property
    def identity(self) -> Mapping[str, Any]:
        """The given identity, with the rank; or ``model_identity``, which reads all weights once."""
        if self._identity is None:
            self._identity = model_identity(self.model)
        return self._identity

    @property
    def busy(self) -> bool:
        """Whether a request is running or waiting."""
        return bool(self._waiting or self._running)

    @property
    def waiting(self) -> tuple[Request, ...]:
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests that have a sequence, the longest running first."""
        return tuple(self._running)

    # Requests.

    def encode(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids. Raises RequestError for an empty or too long prompt, or an invalid id."""
        return encode_prompt(self.tokenizer, prompt, self.model.config, self.limit)

    @in_turn
    def submit(
        self,
        prompt: Prompt,
        settings: GenerationOptions | None = None,
        draft: Draft | None = None,
        stream: int = 0,
        salt: str = "",
        shared: int = 0,
        retention: Retention | None = None,
        listener: Listener | None = None,
        session_id: str = "",
        next_use: float | None = None,
    ) -> Request:
        """Queue a request; it starts in the first ``step`` that has a free sequence for it.

        Only requests with the same ``salt`` reuse what it computes; all requests reuse its first ``shared``
        tokens (``PrefixCache.begin``), which are at most the prompt. With adapters, it is reused only by
        requests whose adapters have the same content and scales; adapters may change while the engine is not
        busy. ``retention``: how long it is kept after the request ends. ``session_id``: the session of an
        agent that it belongs to (``prefix.agent_sessions``); ``next_use``: the seconds after its end until
        the session's next request.

        ``draft`` proposes tokens of the answer, which then takes fewer passes; it requires an engine with
        SpeculativeOptions. Requests with the same seed sample the same tokens unless their ``stream``
        differs. ``listener`` is called with each event of the request, in whichever thread calls ``step``,
        which then does not return these events; it must not raise.

        Raises RequestError for a prompt or settings that cannot be served; nothing is queued then.
        """
        draft = draft or self.draft
        tokens, settings = self._checked(
            "submit", prompt, settings, draft, salt, shared, retention, session_id, next_use
        )
        drafts: object = draft
        if isinstance(drafts, DraftsInCache):
            drafts.bind(self.model, self.cache)
        variant = self.variant()
        tenant = Tenant.of(salt, shared, variant)
        run = RequestState(self._submitted, tokens, settings, settings.sampler(stream))
        if self.tokenizer is not None:
            run.decoder = self.tokenizer.stream(tokens)
        self._submitted += 1
        self.statistics.prompt_tokens += len(tokens)
        whose = {"salt": salt, "shared": shared, "variant": variant}
        request = Request(run, draft, whose, self.prefix.alphabet.encode(tokens, tenant))
        request.retention, request.session_id, request.next_use = retention, session_id, next_use
        for other in self._running:
            plan_sharing(other, [request], self.prefix)
        if self.busy:  # otherwise it starts in the next step, and reads its own prefix
            request.ahead = self.prefix.prefetch(tokens, **whose)
        self._waiting.append(request)
        if listener is not None:
            self._listeners[request.id] = listener
        return request

    def _checked(
        self,
        op: str,
        prompt: Prompt,
        settings: GenerationOptions | None,
        draft: Draft | None,
        salt: str,
        shared: int,
        retention: Retention | None,
        session_id: str,
        next_use: float | None,
    ) -> tuple[list[int], GenerationOptions]:
        """The tokens and settings of a request. Raises RequestError where it cannot be served."""
        self._check(op)
        if draft is not None and not self._verifier.enabled:
            raise RequestError(f"{op}: draft= needs an engine with SpeculativeOptions")
        try:
            tokens, settings = self.encode(prompt), settings_for(self.tokenizer, settings)
            Tenant(salt, shared)
            if shared > len(tokens):
                raise RequestError(
                    f"shared={shared}; the prompt has {len(tokens)} tokens, all of which everyone would "
                    "share: count the tokens that are the same for everyone"
                )
            if retention is not None and not isinstance(retention, Retention):
                raise InvalidRangeError(f"retention={retention!r:.80}; it must be a Retention, or None")
            if not isinstance(session_id, str):
                raise InvalidRangeError(f"session_id={session_id!r:.60}; it must be a string")
            if next_use is not None and (type(next_use) not in (int, float) or not 0 <= next_use < math.inf):
                raise InvalidRangeError(f"next_use={next_use!r:.60}; it must be a number of at least 0")
        except (InvalidRangeError, RequestError) as error:
            raise RequestError(f"{op}: {error}") from error
        return tokens, settings

    @in_turn
    def variant(self) -> Any:
        """Identifies what computes besides the model's own weights, such as an adapter
        (``PrefixCache.begin``). Raises RequestError if it has changed since an unfinished request began.
        """
        variant = getattr(self.model, "variant", lambda: None)()
        if any(other.whose.get("variant") != variant for other in [*self._waiting, *self._running]):
            raise RequestError(
                "submit: the model's weights or adapters have changed, while earlier requests are "
                "unfinished; finish or cancel them before a change"
            )
        return variant

    @in_turn
    def cancel(self, request: Request) -> bool:
        """End a request without an answer and keep what it computed. False: it had already ended.

        Its listener receives no further events.
        """
        if self._listeners.pop(request.id, None) is not None:
            self._events = [event for event in self._events if event.request != request.id]
        if request.done:
            return False
        self._over(request, [], [])
        return True

    @overload
    def stream(
        self, prompt: Prompt, settings: GenerationOptions | None = None, *,
        include_finished: Literal[False] = False, draft: Draft | None = None,
        salt: str = "", shared: int = 0, retention: Retention | None = None,
        session_id: str = "", next_use: float | None = None,
    ) -> AsyncGenerator[Token, None]: ...  # fmt: skip
    @overload
    def stream(
        self, prompt: Prompt, settings: GenerationOptions | None = None, *,
        include_finished: bool, draft: Draft | None = None,
        salt: str = "", shared: int = 0, retention: Retention | None = None,
        session_id: str = "", next_use: float | None = None,
    ) -> AsyncGenerator[Token | Finished, None]: ...  # fmt: skip
    def stream(
        self,
        prompt: Prompt,
        settings: GenerationOptions | None = None,
        *,
        include_finished: bool = False,
        draft: Draft | None = None,
        salt: str = "",
        shared: int = 0,
        retention: Retention | None = None,
        session_id: str = "",
        next_use: float | None = None,
    ) -> AsyncGenerator[Any, None]:
        """The answer as it is generated: ``async for token in engine.stream(prompt)``.

        May be used by any number of tasks, in event loops of any threads: a thread of the engine makes the
        passes, so that no loop waits for one. If the iteration ends early (the task is cancelled, the
        generator closed), the request is cancelled. With ``include_finished`` the last item is the
        ``Finished``, which says why the answer ended and how much of the prompt was reused.

        The other arguments are those of ``submit``. Those that cannot be served are refused when ``stream``
        is called, before a server sends its headers; the iteration raises the errors with which the request
        or a pass fails.
        """
        tokens, settings = self._checked(
            "stream", prompt, settings, draft, salt, shared, retention, session_id, next_use
        )
        return self._streams.stream(
            tokens, settings, include_finished, draft=draft, salt=salt, shared=shared, retention=retention,
            session_id=session_id, next_use=next_use,
        )  # fmt: skip

    def complete(
        self, prompts: Sequence[Prompt], settings: GenerationOptions | None = None
    ) -> list[Finished]:
        """Submit all prompts and step until they are done; returns one answer per prompt, in order.

        Raises the error of a failed request; these requests have then all ended. Other requests continue
        meanwhile, including those of ``complete`` in other threads; the next ``step`` returns their events.
        """
        if isinstance(prompts, str):
            raise RequestError("complete: prompts is a string; it must be a sequence of prompts")
        requests: list[Request] = []
        with ExitStack() as ending:
            for prompt in prompts:
                requests.append(request := self.submit(prompt, settings, listener=_ignored))
                ending.callback(self.cancel, request)
            while not all(request.done for request in requests):
                self.advance()
                for request in requests:
                    if request.error is not None:
                        raise request.error
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Finished:
        if request.error is not None:
            raise request.error
        if request.answer is None:
            self._check("complete")
            raise RequestError(f"complete: request {request.id} was cancelled meanwhile")
        return request.answer

    @in_turn
    def forget(self) -> None:
        """Discard the snapshots kept in the cache and in host memory; running requests and stores are
        unchanged.
        """
        self._verifier.clear()
        self.prefix.clear()

    @in_turn
    def close(self, flush: bool = True) -> None:
        """Cancel all requests, write kept snapshots to the stores (if ``flush``) and close the cache."""
        if self.closed:
            return
        self.closed = True
        try:
            for request in [*self._waiting, *self._running]:
                self.cancel(request)
            self.prefix.close(flush)
        finally:
            self.cache.close()

    # The loop.

    @in_turn
    def admit(self) -> list[EngineEvent]:
        """Start requests while there is room, as ``step`` does before its pass; returns the events."""
        self._check("admit")
        with self.ranks.together():
            self._read_again()
            self._admit(self._events)
        return self.take_events()

    @in_turn
    def take_events(self) -> list[EngineEvent]:
        """The events from before a failed pass, which the next ``step`` would return; usually none."""
        events, self._events = self._events, []
        others: list[EngineEvent] = []
        for event in events:
            ended = isinstance(event, (Finished, Failed))
            listener = (self._listeners.pop if ended else self._listeners.get)(event.request, None)
            if listener is None:
                others.append(event)
            else:
                listener(event)
        return others

    @in_turn
    def advance(self) -> None:
        """``step`` for a caller with listeners: events for others are returned by the next ``step``."""
        self._events = self.step()

    @in_turn
    def step(self) -> list[EngineEvent]:
        """Start requests while there is room, then make one forward pass; returns the events in order.

        A request that cannot start, or cannot continue even alone, ends with ``Failed``, or with "capacity"
        if it has part of an answer. Any other error of a pass is raised here: the pass has then not happened,
        its requests remain, and the next ``step`` tries again. That ``step`` also returns the events from
        before the failed pass; ``take_events`` returns them without a pass. If ranks share the model and one
        of them fails while it begins a pass, the others raise GroupError and can try again too. A rank that
        fails later, or is interrupted, ends the group: from then on ``step`` raises GroupError on all ranks.
        """
        self._check("step")
        with self.ranks.together():
            events = self._events = self.admit()
            drafting = self._verifier.enabled
            while parts := self._plan(drafting, events):
                began = time.perf_counter()
                try:
                    chosen = self.forward(parts)
                except CacheFullError as error:
                    self._agree_on(parts)
                    if any(part.branches for part in parts):
                        drafting = False
                    else:
                        self._make_room(error, events)
                    continue
                self._take(parts, chosen, events)
                self._count(parts, time.perf_counter() - began)
                break
        return self.take_events()

    @in_turn
    def forward(self, parts: Sequence[Part]) -> Chosen:
        """One pass over the next tokens of some sessions; returns the tokens chosen for the parts that end
        there.

        The logits stay on the device, and the sampled tokens of all parts are read in one transfer. If the
        pass fails, its tokens are removed from the cache. If that removes more than them (a state without an
        earlier copy), the rest is computed again.
        """
        self._computed_by.clear()
        try:
            with self.ranks.telling() as telling, self.model.backend.new_context() as ctx:
                here, asked, vocabulary = ctx.input(), inputs_of(parts), self.model.config.vocab_size
                choice = Choice(here, asked.draws, vocabulary, asked.logprobs, asked.proposed)
                start_pass(self.model, ctx, asked.batch, self.cache)
                telling.how = None  # the model reports them
                logits = self.model.forward(ctx, asked.batch, self.cache)
                telling.how = self.ranks.abandon
                chosen = choice(here, logits)
        except BaseException as error:
            self._take_back(parts, isinstance(error, SequenceLostError))
            raise
        for part in parts:
            part.request.run.stored += part.count
        return chosen

    def _admit(self, events: list[EngineEvent]) -> None:
        """Start requests in order; while others compute, requests without pending reads go first."""
        alone = self.ranks.alone  # reads of other ranks are unknown here
        for request in sorted(self._waiting, key=lambda request: alone and request.fetching):
            if self._full or len(self.prefix.sessions) == self.options.max_sequences:
                return
            if alone and self._running and request.fetching:
                continue
            if worth_waiting(request, self._running, self.prefix, self.ranks):
                continue
            try:
                run, known = request.run, len(request.run.tokens)
                if self.options.batch_invariant:  # an answer's tokens are computed one by one, as originally
                    known = run.prompt_tokens
                agent = {"session_id": request.session_id, "next_use": request.next_use}
                session = self.ranks.begin(self.prefix, run.tokens[:known], **request.whose, **agent)
                if run.tokens[known:]:
                    session.extend(run.tokens[known:])
            except Exception as error:
                full = isinstance(error, CacheFullError)
                if full and self._running:
                    self._full = True
                    return
                if not (full or self.ranks.alone):  # other ranks may have begun it
                    raise
                self._over(request, events, [Failed(request.id, error)])
                continue
            self._start(request, session, events)

    def _start(self, request: Request, session: Session, events: list[EngineEvent]) -> None:
        self._waiting.remove(request)
        self._running.append(request)
        request.session = session
        if (mtp := getattr(self.model, "mtp", None)) is not None:
            mtp.forget(self.cache, session.seq)
        session.retention = request.retention
        self.statistics.reused_tokens += session.cached
        if request.started:
            request.run.stored = session.cached
        else:
            request.started, request.lookup = True, session.lookup
            events.append(request.run.start(session.cached, session.spared))
        request.release()
        plan_sharing(request, self._waiting, self.prefix)

    def _plan(self, drafting: bool, events: list[EngineEvent]) -> list[Part]:
        """The next pass: the next token of every answer, and as much of prompts as there is room for."""
        if self.options.batch_invariant:
            return self._alone()
        parts: list[Part] = []
        for request in self.running:
            if request.prefilling:
                continue
            if not drafting:
                parts.append(Part(request, len(request.run.tokens) - request.run.stored))
                continue
            try:
                parts.append(self._verifier.part(request, self.limit))
            except Exception as error:  # the error of its draft, so it concerns this request alone
                if not self.ranks.all_fail():
                    raise
                self._over(request, events, [Failed(request.id, error)])
        room = self.options.largest_batch - sum(part.size for part in parts)
        prompts = [request for request in self._running if request.prefilling]
        return [*parts, *chunks(prompts, min(room, self.options.prefill_chunk), self.prefix)]

    def _alone(self) -> list[Part]:
        """The next pass of the request that has waited for one the longest."""
        if not self._running:
            return []
        request = min(self._running, key=lambda request: request.turn)
        self._turn += 1
        request.turn = self._turn
        return list(chunks([request], self.options.largest_batch, self.prefix))

    def _take(self, parts: Sequence[Part], chosen: Chosen, events: list[EngineEvent]) -> None:
        """Process the tokens drawn for the parts that reached the end of their tokens."""
        row = 0
        for part in parts:
            request, run, known = part.request, part.request.run, part.request.run.stored
            if part.prefill and run.stored <= run.prompt_tokens:
                events.append(Prefilled(request.id, run.stored, run.prompt_tokens))
            tried = []
            for branch in part.tried if run.stored == len(run.tokens) else ():
                tried.append((branch, row))
                row += len(branch.draft) + 1
            try:
                if part.prefill and request.session is not None:
                    self._keep(request.session)
                if tried:
                    self._accept(part, chosen, tried, events)
            except BaseException as error:
                if not isinstance(error, Exception):
                    if tried and request.session is not None:
                        self._rewind(request, min(known, len(run.tokens) - 1))
                    raise
                # This request alone fails: what was computed for the others is valid.
                if request.done:
                    log.warning("request %d: its last pass could not be processed", request.id, exc_info=True)
                else:
                    if not isinstance(error, RunnerError):  # caused by the logits, so it occurs on all ranks
                        self.ranks.abandon(error)
                    self._over(request, events, [Failed(request.id, error)], keep=not part.branches)

    def _keep(self, session: Session) -> None:
        try:
            session.keep()
        except Exception:
            if self.ranks.alone:
                raise
            # The other ranks have kept it, and continue with all requests.
            log.warning("sequence %d: what it computed could not be kept", session.seq, exc_info=True)

    def _accept(
        self,
        part: Part,
        chosen: Chosen,
        tried: Sequence[tuple[Branch, int]],
        events: list[EngineEvent],
    ) -> None:
        request, run, statistics = part.request, part.request.run, self.statistics
        known = run.stored
        accepted: list[Token | Finished] = []
        settled = False
        try:
            winner = accept(run, chosen, tried, self.model.config.eos_ids, self.limit, accepted)
            right = run.stored
            new = sum(map(has_token, accepted))
            statistics.generated_tokens += new
            statistics.decoded_tokens += new - (
                run.generated == new > 0
            )  # the first token comes from its prefill
            if not part.prefill:
                self.speculation.passes += request.draft is not None
            if part.branches:
                run.stored = self._verifier.settle(part, winner, known, right)
            request.repeat = right - run.stored
            if request.session is not None:
                request.session.extend(run.tokens[known:])
            settled = True
        finally:
            if accepted and isinstance(accepted[-1], Finished):
                self._over(request, events, accepted, keep=settled or not part.branches)
            else:
                events.extend(accepted)

    def _over(
        self, request: Request, events: list[EngineEvent], last: Sequence[EngineEvent], keep: bool = True
    ) -> None:
        """End a request with these events, whether or not what it computed can be kept."""
        request.done = True
        events.extend(last)
        if last and isinstance(last[-1], Failed):
            request.error = last[-1].error
        elif last and isinstance(last[-1], Finished):
            request.answer = last[-1]
        self._leave(request, keep)

    # Preemption and failures.

    def _make_room(self, error: CacheFullError, events: list[EngineEvent]) -> None:
        """Put the request that started last back into the queue; if it is the only one, end it."""
        if not self._running:  # all start again
            return
        last = self._running[-1]
        if len(self._running) > 1:
            self.preemptions += 1
            self._requeue(last, keep=True)
            self._full = True
        elif last.run.generated:
            self._over(last, events, last.run.end("capacity"))
        else:
            self._over(last, events, [Failed(last.id, error)])

    def _take_back(self, parts: Sequence[Part], lost: bool) -> None:
        """Return every session to its state before the pass, or to an earlier one from which it is computed
        again.
        """
        with ExitStack() as rewinding:  # all of them, even if one is interrupted
            for part in parts:
                rewinding.callback(self._rewind, part.request, 0 if lost else part.request.run.stored)
            self._verifier.clear()

    def _agree_on(self, parts: Sequence[Part]) -> None:
        """After a pass that no rank computed: each request continues from where all ranks can, or starts
        again.
        """
        while not self.ranks.alone:
            stored = [part.request.run.stored if part.request.session else -1 for part in parts]
            least = self.ranks.least(stored)
            if self.ranks.least([-value for value in stored]) == [-value for value in least]:
                return
            for part, value, own in reversed(list(zip(parts, least, stored, strict=True))):
                if value < 0:
                    self._start_anew(part.request)
                elif own > value:
                    self._rewind(part.request, value)

    def _start_anew(self, request: Request) -> None:
        if request in self._running:
            self._requeue(request, keep=False)
        else:  # in the order in which all ranks do so
            self._waiting.remove(request)
            self._waiting.insert(0, request)

    def _read_again(self) -> None:
        """If an interruption came before a token was read, the token before it is computed again."""
        self._verifier.clear()
        for request in self.running:
            if request.run.stored == len(request.run.tokens):
                self._rewind(request, request.run.stored - 1)

    def _rewind(self, request: Request, target: int) -> None:
        session = request.session
        assert session is not None
        try:
            request.run.stored = session.rewind(target)
            session.extend(request.run.tokens[target:])
        except BaseException as error:  # practically lost: it starts again
            if request in self._running:
                self._requeue(request, keep=False)
            if not isinstance(error, Exception):
                raise

    def _requeue(self, request: Request, keep: bool) -> None:
        """Put a request back at the head of the queue, to be continued from its kept snapshots."""
        try:
            self._leave(request, keep)
        finally:
            request.run.stored = 0
            request.stops.clear()
            self._waiting.insert(0, request)

    def _leave(self, request: Request, keep: bool = True) -> None:
        """Release a request's place or sequence; if its content cannot be kept, it is discarded."""
        session, request.session = request.session, None
        if session is None:
            self._waiting.remove(request)
            request.release()
            return
        self._running.remove(request)
        self._full = False
        if keep and (variant := getattr(self.model, "variant", None)) is not None:
            if not self._computed_by:  # looked at once for all that end with a pass
                self._computed_by.append(variant())
            keep = request.whose.get("variant") in self._computed_by  # otherwise it may mix both variants
        try:
            session.close(keep)
        except BaseException as error:
            session.close(keep=False)  # unless it has ended anyway
            if not isinstance(error, Exception):
                raise
            log.warning("request %d: what it computed could not be kept", request.id, exc_info=True)

    def _count(self, parts: Sequence[Part], seconds: float) -> None:
        """Divide a pass's time between prompts and answers by their tokens."""
        prompts = sum(part.count for part in parts if part.prefill)
        prefill_seconds = seconds * prompts / sum(part.size for part in parts)
        self.statistics.computed_tokens += prompts
        self.statistics.prefill_seconds += prefill_seconds
        self.statistics.decode_seconds += seconds - prefill_seconds
        if prompts:
            self.prefix.break_even.computed(prompts, prefill_seconds)

    def _check(self, op: str) -> None:
        if self.closed:
            raise ClosedError(f"{op}: the engine is closed")


def _ignored(event: EngineEvent) -> None:
    """A listener for requests whose answers are read only when they have ended."""
