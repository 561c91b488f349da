"""Conversations over a PrefixCache in tiers, with faults and crashes, against a list of what was said.

What every query sees is checked by ``rigs.conversing``. Numbers that a rule is given pick from what is
there then, so that hypothesis can leave out steps, and what fails comes as a short program.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine as Machine
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test

import ml
from kvcache.cache import CacheDType, CacheFullError, SequenceLostError
from kvcache.caches import branches
from kvcache.prefix.prefix_cache import SessionLimitError, SessionReplacedError
from kvcache.prefix.tiers import HostTier
from kvcache.stores import FileStore, SnapshotCorruptError, StoreFullError, StoreUnavailableError
from ml import DType

from .models.digests import Token, shared
from .rigs.conversing import CACHES, DIVISIBLE, STATEFUL, Chat, ConversationSetup, Rig, every_cache
from .rigs.stores import FlakyStore

ALPHABET: tuple[Token, ...] = (0, 1, 2, 3, b"an image", b"another")
DTYPES = (DType.F32, DType.F16, DType.BF16, DType.Q8_0, DType.Q4_0, "F8_E4M3/AFFINE4_32", "F16/Q4_0")
LONGEST = 30
ERRORS = (StoreUnavailableError, StoreFullError, SnapshotCorruptError)
IDENTITY = {"model": "digests"}
ONE = ConversationSetup().token_bytes
MANAGED = ("evict", "evict all", "flush", "write", "clear", "defrag")
UNLIKE = ("", "", "", "salt", "identity", "dtype", "block_size")


@dataclass(frozen=True)
class PrefixSetup:
    """Where conversations are kept. ``host``, ``budget``: bytes, None for no limit; ``host`` 0: no tier."""

    talk: ConversationSetup = field(default_factory=ConversationSetup)
    budget: int | None = None
    host: int | None = 0
    store: str = ""
    """"memory", "file", or none."""
    backlog: int = 1 << 20
    in_flight: int = 1 << 20
    grain: int = 16
    """Tokens, at whose multiples edges are parted to be evicted."""

    @property
    def keeps_all(self) -> bool:
        """Whether nothing can get lost, so that what is there is known.

        Of what came from a store parts may be left to it, where only multiples of the block size are found.
        """
        return self.host is None and not self.store


def setups(dtypes: tuple[CacheDType, ...], **fixed: Any) -> st.SearchStrategy[PrefixSetup]:
    """Setups of all kinds, but for what is ``fixed``: fields of PrefixSetup, or ``cache``."""

    def pick(*choices: Any) -> st.SearchStrategy[Any]:
        return st.sampled_from(choices)

    config = st.builds(
        ml.CacheConfig, cache_padding=pick(1, 1, 4), mask_batch_padding=pick(1, 3), permuted_v=st.booleans(),
        layout=st.sampled_from(list(ml.Layout)), elide_mask=st.booleans(),
    )  # fmt: skip
    cache = fixed.pop("cache", None)
    talk = st.builds(
        ConversationSetup,
        cache=pick(*CACHES) if cache is None else st.just(cache),
        max_sequences=pick(1, 2, 3),
        capacity=pick(LONGEST, 48, 200, LONGEST // 2 + 1),
        max_batch=st.just(32),
        dtype=pick(*dtypes),
        config=config,
        options=st.fixed_dictionaries({"block_size": pick(1, 3, 4, 8), "interval": pick(4, 8, 16)}),
    ).map(lambda t: replace(t, capacity=32) if t.max_sequences == 1 and t.capacity < 32 else t)
    drawn = {
        "budget": pick(None, None, 0, 10 * ONE - 1, 8000),
        "host": pick(None, None, 0, 7 * (ONE + 8) - 1, 6000),
        "store": pick("", "memory", "memory", "file"),
        "backlog": pick(1 << 20, 0),
        "in_flight": pick(1 << 20, 0, 1, 1500),
        "grain": pick(1, 4, 16),
    }
    drawn |= {name: st.just(value) for name, value in fixed.items()}
    return st.builds(PrefixSetup, talk=talk, **drawn)


number = st.integers(0, (1 << 16) - 1)
said = st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=5)
any_chat = precondition(lambda self: bool(self.live))


class Conversations(Machine):
    """Sessions of one PrefixCache, which may crash and be opened again; subclasses say on which backend."""

    backend: ClassVar[ml.Backend]
    setups: ClassVar[st.SearchStrategy[PrefixSetup]]

    @initialize(data=st.data())
    def make(self, data: st.DataObject) -> None:
        self.setup = data.draw(self.setups, label="setup")
        self.folder = Path(tempfile.mkdtemp(prefix="kvcache-trace-"))
        self.memory = FlakyStore() if self.setup.store == "memory" else None
        self.past: list[list[Token]] = [[0, 1, 2]]
        self.kept: list[list[Token]] = []
        """Evaluated and closed since the last that may have lost something."""
        self.ends: list[list[Token]] = []
        """Of these the ones where a snapshot of all was taken."""
        self.unlike: set[str] = set()
        """Ways in which another process was unlike this one."""
        self.reliable = self.setup.store != ""
        """Nothing that the stores were given is lost."""
        self.open()

    def open(self) -> None:
        tiers: list[Any] = [] if self.setup.host == 0 else [HostTier(self.setup.host)]
        self.file = FileStore(self.folder, durable=False) if self.setup.store == "file" else None
        tiers += [store for store in (self.memory, self.file) if store is not None]
        self.rig = Rig(
            self.setup.talk, self.backend, self.setup.budget, tiers,
            identity=IDENTITY, backlog=self.setup.backlog, in_flight=self.setup.in_flight,
        )  # fmt: skip
        self.rig.prefix.evictor.grain = self.setup.grain
        self.live: list[Chat] = []
        self.kept.clear()
        self.ends.clear()

    @property
    def divisible(self) -> bool:
        return self.setup.talk.cache in DIVISIBLE

    def chat(self, which: int) -> Chat:
        return self.live[which % len(self.live)]

    def ready(self, which: int) -> Chat | None:
        """A conversation of which all is evaluated, and that has room for more."""
        chat = self.chat(which)
        return chat if chat.done == len(chat.tokens) < LONGEST else None

    # Conversations.

    @rule(base=number, cut=number, more=said, size=st.sampled_from((3, 8, 100)), care=st.integers(0, 7))
    def begin(self, base: int, cut: int, more: list[Token], size: int, care: int) -> None:
        """A prompt that begins like one that was there; ``care`` 0: nobody evaluates it."""
        known = self.past[base % len(self.past)]
        start = known[: len(known) if cut % 3 else cut // 3 % (len(known) + 1)][: LONGEST - 5]
        tokens = [*start, *(more if cut % 7 or not start else ())]
        before, stats = [(chat, chat.done) for chat in self.live], replace(self.rig.prefix.stats)
        try:
            chat = self.rig.begin(tokens)
        except (SessionLimitError, CacheFullError) as error:
            assert self.live, "an empty cache has room for every prompt"
            if isinstance(error, SessionLimitError):
                assert len(self.live) == self.setup.talk.max_sequences
            else:
                check_full(error)
            assert [(chat, self.rig.cache.offset(chat.seq)) for chat in self.live] == before
            assert self.rig.prefix.stats == stats
            return
        found = self.rig.prefix.stats
        assert found.reused - stats.reused == chat.cached
        assert (found.sessions, found.tokens) == (stats.sessions + 1, stats.tokens + len(tokens))
        self.check_longest(chat)
        self.live.append(chat)
        if care:
            self._guarded(chat, lambda: chat.prefill(size, care > 1))

    again = begin

    def check_longest(self, chat: Chat) -> None:
        def most(others: list[list[Token]]) -> int:
            found = max((shared(other, chat.tokens) for other in others), default=0)
            return min(found, len(chat.tokens) - 1)

        live = [other.tokens[: other.done] for other in self.live]
        longest = most([*live, *self.kept])
        if self.divisible:
            assert chat.cached >= most(live)
            if self.setup.keeps_all:
                assert chat.cached >= longest
            elif self.reliable:
                assert chat.cached >= longest - longest % self.setup.talk.options["block_size"]
        elif self.setup.keeps_all:
            whole = [end for end in self.ends if chat.tokens[: len(end)] == end]
            assert chat.cached >= max((len(end) for end in whole if len(end) < len(chat.tokens)), default=0)

    @any_chat
    @rule(which=number, more=said)
    def say(self, which: int, more: list[Token]) -> None:
        chat = self.ready(which)
        if chat is not None:
            self._guarded(chat, lambda: chat.say(more[: LONGEST - chat.done]))

    say_on = say

    @any_chat
    @rule(which=number, draft=said, right=st.integers(0, 5))
    def speculate(self, which: int, draft: list[Token], right: int) -> None:
        """Tokens that are evaluated ahead, and taken back but for the first ones."""
        chat = self.ready(which)
        if chat is None:
            return
        draft, cache, at = draft[: LONGEST - chat.done], self.rig.cache, chat.done
        right = 0 if self.setup.talk.cache in STATEFUL else min(right, len(draft) - 1)
        mark = branches.mark(cache, chat.seq)

        def act() -> None:
            self.rig.evaluate(chat.seq, chat.tokens, draft)
            branches.rollback(cache, chat.seq, at + right, mark)
            chat.session.extend(draft[:right])
            chat.tokens += draft[:right]
            chat.done += right

        self._guarded(chat, act)

    @any_chat
    @rule(which=number)
    def close(self, which: int) -> None:
        self._close(self.chat(which))

    close_one = close

    def _close(self, chat: Chat) -> None:
        self.live.remove(chat)
        chat.close()
        tokens = chat.tokens[: chat.done]
        self.past.append(tokens or [0])
        self.kept.append(tokens)
        if not chat.rewound:
            self.ends.append(tokens)

    @any_chat
    @rule(which=number, how=st.sampled_from(("drop", "raise", "fail", "forget", "lose")), more=said)
    def end_badly(self, which: int, how: str, more: list[Token]) -> None:
        """Not kept; left by an exception, in a pass; with tokens nobody evaluated; lost by the device."""
        chat = self.chat(which)
        session, seq = chat.session, chat.seq
        if how == "forget":
            session.extend(more)
            self._close(chat)
            return
        self.live.remove(chat)
        if how == "drop":
            chat.close(keep=False)
        elif how == "lose":
            self.rig.cache.mark_lost(seq)
            if chat.done:
                with pytest.raises(SequenceLostError):
                    self.rig.start_only(seq, chat.done, 1)
            session.close(chat.done > 0)
        else:
            with pytest.raises((LookupError, CacheFullError)), session:
                if how == "fail":
                    session.extend(more)
                    self.rig.start_only(seq, chat.done, len(chat.tokens) + len(more) - chat.done)
                raise LookupError
        session.close()
        assert session.closed

    @any_chat
    @rule(which=number, length=number)
    def go_back(self, which: int, length: int) -> None:
        """Forget the end of a conversation, and go on from there."""
        chat = self.chat(which)
        self._rewind(chat, length % (chat.done + 1))

    def _rewind(self, chat: Chat, length: int) -> None:
        self._guarded(chat, lambda: chat.rewind(length))
        if chat in self.live and not chat.tokens:
            self._close(chat)

    @any_chat
    @rule(which=number, other=number, again=st.booleans())
    def replace(self, which: int, other: int, again: bool) -> None:
        """Another conversation's tokens are put in the place of a session's, behind its back."""
        chat, source = self.chat(which), self.chat(other)
        if chat is source:
            return
        self.rig.cache.copy_prefix(source.seq, chat.seq, source.done)
        for use in (lambda: chat.session.extend([0]), chat.session.keep):
            with pytest.raises(SessionReplacedError, match=f"sequence {chat.seq}.*rewind"):
                use()
        assert chat.session.tokens == chat.tokens
        if again:
            self._rewind(chat, chat.done)
        else:
            self.live.remove(chat)
            chat.close()

    @any_chat
    @rule(which=number, at=number, more=said)
    def cut(self, which: int, at: int, more: list[Token]) -> None:
        """Tokens are removed behind a session's back, and others come in their place: neither is kept."""
        chat, cache = self.chat(which), self.rig.cache
        cache.remove(chat.seq, at % (chat.done + 1))
        left = min(chat.done, cache.offset(chat.seq))
        if cache.can_resume(chat.seq, left) and cache.resume_point(chat.seq, left) == left:
            try:
                self.rig.evaluate(chat.seq, chat.tokens[:left], more[: LONGEST - left])
            except CacheFullError as error:
                check_full(error)
        self.live.remove(chat)
        chat.session.extend(more)
        chat.close()

    def _guarded(self, chat: Chat, act: Callable[[], None]) -> None:
        """What does not fit ends the conversation."""
        try:
            act()
        except CacheFullError as error:
            check_full(error)
            assert len(self.live) > 1, "one conversation always has room"
            self._close(chat)

    # Tiers.

    @rule(how=st.sampled_from(MANAGED), a=number, b=number)
    def manage(self, how: str, a: int, b: int) -> None:
        prefix = self.rig.prefix
        if how.startswith("evict"):
            prefix.evict(None if how == "evict all" else a % 4000)
            assert how == "evict" or not prefix.nbytes["device"]
        elif how == "flush":
            self._flush()
        elif how == "write":
            prefix.write_through(None if b % 2 else a % 2000)
        elif how == "clear":
            prefix.clear()
            self.kept.clear()
            self.ends.clear()
            assert not any(prefix.nbytes.values())
            if not self.live:
                self.rig.check_empty()
        else:
            assert how == "defrag"
            for _, part, cache in self.rig.parts_of():
                if not part.encoder:
                    getattr(cache, "attention", cache).defrag()

    def _flush(self) -> None:
        """All is written, once, and nothing is under way."""
        prefix = self.rig.prefix
        prefix.flush()
        assert prefix.nbytes.get("writing", 0) == prefix.nbytes.get("leaving", 0) == 0
        tier = prefix.tree.store
        if tier is not None and self.memory is not None and not self.memory.every:
            before = tier.written
            prefix.flush()
            assert tier.written == before

    # What happens elsewhere.

    @rule(lost=st.booleans())
    def crash(self, lost: bool) -> None:
        """The process ends without close; what waits to be written may or may not get there."""
        self.reliable = self.setup.store != "" and not (self.memory and self.memory.every)
        self.rig.crash(lost)
        if self.file is not None:
            self.file.close()
        self.open()

    @precondition(lambda self: self.setup.store)
    @rule(base=number, more=said, unlike=st.sampled_from(UNLIKE))
    def elsewhere(self, base: int, more: list[Token], unlike: str) -> None:
        """Another process asks for what this one may have stored; one ``unlike`` this one shares nothing."""
        talk = replace(self.setup.talk, max_sequences=1, capacity=LONGEST, config=None)
        options: dict[str, Any] = {"identity": IDENTITY}
        if unlike == "block_size":
            talk = replace(talk, options={**talk.options, "block_size": 5})
        elif unlike == "dtype":
            talk = replace(talk, dtype=DType.F16 if talk.dtype is DType.F32 else DType.F32)
        elif unlike:
            options[unlike] = {"salt": "another", "identity": {"model": "another"}}[unlike]
        other = Rig(talk, self.backend, None, [self.memory or self.file], **options)
        found = other.keep([*self.past[base % len(self.past)][: LONGEST - 5], *more])
        assert not unlike or other.prefix.stats.store == found == 0 or unlike in self.unlike
        other.prefix.close()
        self.unlike.add(unlike)

    @precondition(lambda self: self.setup.store)
    @rule(seed=number, how=st.sampled_from(("gone", "short", "flipped", "flipped")), count=st.integers(1, 9))
    def damage(self, seed: int, how: str, count: int) -> None:
        """Bytes flipped, files cut or gone."""
        rnd = random.Random(seed)
        self.reliable = False
        self.rig.tier.writes.flush()
        if self.memory is not None and not self.memory.every:
            for key in sorted(self.memory._entries or {}):
                if rnd.random() < 0.3:
                    self.memory.delete(key)
        files = sorted(path for path in self.folder.glob("pages/*") if path.stat().st_size)
        for path in rnd.sample(files, min(len(files), count)):
            data = bytearray(path.read_bytes())
            data[rnd.randrange(len(data))] ^= 1 << rnd.randrange(8)
            if how == "gone":
                path.unlink()
            else:
                path.write_bytes(data if how == "flipped" else data[: rnd.randrange(len(data))])

    @precondition(lambda self: self.memory is not None)
    @rule(every=st.sampled_from((0, 0, 1, 2, 5)), error=st.sampled_from(ERRORS))
    def flaky(self, every: int, error: type[Exception]) -> None:
        """Every so many calls of the store fail, or none from now on."""
        assert self.memory is not None
        self.reliable = False
        self.memory.every, self.memory.error = every, error

    # What holds at any time.

    @invariant()
    def books_are_kept(self) -> None:
        self.rig.check_books()
        assert self.rig.prefix.failed["host"] == 0
        assert {chat.session for chat in self.live} == set(self.rig.prefix.sessions)

    def teardown(self) -> None:
        """Every conversation goes on, unharmed, and all cells are free at the end."""
        if not hasattr(self, "rig"):
            return
        try:
            for chat in self.live:
                if chat.tokens and chat.done == len(chat.tokens) < LONGEST:
                    try:
                        chat.say([3])
                    except CacheFullError as error:
                        check_full(error)
            self.rig.prefix.close()
            self.rig.check_empty()
        finally:
            self.rig.crash(False)
            shutil.rmtree(self.folder)


def check_full(error: CacheFullError) -> None:
    """A refusal for want of cells, with cells enough, is none."""
    if error.asked <= error.free:
        raise AssertionError(f"{error.asked} cells are refused, and {error.free} are free") from error


def run_machine(
    backend: ml.Backend, examples: int, dtypes: tuple[CacheDType, ...] = DTYPES, **fixed: Any
) -> None:
    """So many programs on a backend; what fails is raised, made short unless ML_UNSHRUNK is set."""
    named = {"backend": backend, "setups": setups(dtypes, **fixed)}
    phases = [Phase.generate] if "ML_UNSHRUNK" in os.environ else [Phase.generate, Phase.shrink]
    run_state_machine_as_test(
        type("ConversationsOn", (Conversations,), named),
        settings=settings(
            max_examples=examples, stateful_step_count=30, deadline=None, database=None, derandomize=True,
            phases=phases, suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip


@every_cache
def test_sessions_see_what_computing_from_nothing_would_store(strict_backend: ml.Backend, cache: str) -> None:
    run_machine(strict_backend, 120 if "ML_LONG" in os.environ else 8, cache=cache)


def test_on_other_backends_too(other: ml.Backend) -> None:
    run_machine(other, 6)
