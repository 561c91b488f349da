"""Random conversations over a PrefixCache in tiers: begun, closed, evicted, crashed and damaged.

A trace is made from its seed alone: a setup, and operations whose numbers pick from what is there then,
so that any part of them is a trace too, and what fails can be shrunk. What every query sees is checked
by :mod:`kvcache.testing.conversing`.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml
from kvcache.cache import CacheFullError
from kvcache.offload.tiers import HostTier
from kvcache.prefix.prefix_cache import SessionLimitError
from kvcache.stores import FileStore, MemoryStore, SnapshotCorrupt, StoreFull, StoreUnavailable
from kvcache.testing.conversing import CACHES, DIVISIBLE, Chat, ConversationSetup, Rig, shared
from ml import DType

__all__ = ["FlakyStore", "PrefixSetup", "prefix_failure", "random_ops", "random_prefix_setup", "run_ops"]

Op = tuple[str, int, int, int]
"""A name and three numbers, each taken modulo what there is to pick from."""
ALPHABET: tuple[int | bytes, ...] = (0, 1, 2, 3, b"an image", b"another")
LONGEST = 30
ERRORS = (StoreUnavailable, StoreFull, SnapshotCorrupt)


class FlakyStore(MemoryStore):
    """A store in memory that fails when told to: in the calls of ``failing``, or in every ``every``-th."""

    def __init__(self, budget: int | None = None) -> None:
        super().__init__(budget)
        self.failing: frozenset[str] = frozenset()
        self.every = 0
        self.calls = 0
        self.error: type[Exception] = StoreUnavailable

    def _fail(self, name: str) -> None:
        self.calls += 1
        if name in self.failing or (self.every and self.calls % self.every == 0):
            raise self.error(f"{name}: told to fail")

    def put(self, key: str, parts: Sequence[Any]) -> bool:
        self._fail("put")
        return super().put(key, parts)

    def stat(self, keys: Sequence[str]) -> list[Any]:
        self._fail("stat")
        return super().stat(keys)

    def get_into(self, key: str, buffer: Any) -> bool:
        self._fail("get_into")
        return super().get_into(key, buffer)

    def prefix(self, keys: Sequence[str]) -> int:
        self._fail("prefix")
        return super().prefix(keys)

    def delete(self, key: str) -> bool:
        self._fail("delete")
        return super().delete(key)


@dataclass(frozen=True)
class PrefixSetup:
    """What a trace runs on. ``host`` and ``budget`` are bytes, None for no limit, ``host`` 0 for no tier."""

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
    def exact(self) -> bool:
        """Whether nothing can get lost, so that the longest common prefix is there.

        Of what came from a store parts may be left to it, where only multiples of the chunk are found.
        """
        return self.talk.cache in DIVISIBLE and self.host is None and not self.store


def random_prefix_setup(rnd: random.Random, floats: Sequence[DType]) -> PrefixSetup:
    config = ml.CacheConfig(
        cache_padding=rnd.choice((1, 1, 4)),
        mask_batch_padding=rnd.choice((1, 3)),
        permuted_v=rnd.random() < 0.3,
        layout=rnd.choice(list(ml.Layout)),
        elide_mask=rnd.random() < 0.5,
    )
    sequences = rnd.choice((1, 2, 3))
    talk = ConversationSetup(
        cache=rnd.choice(list(CACHES)),
        max_sequences=sequences,
        capacity=rnd.choice((32, 32, 48, 200) if sequences == 1 else (LONGEST // 2 + 1, 32, 48, 200)),
        max_batch=32,
        dtype=rnd.choice(list(floats)),
        config=config,
        options={"block_size": rnd.choice((1, 3, 4, 8)), "interval": rnd.choice((4, 8, 16))},
    )
    return PrefixSetup(
        talk,
        budget=rnd.choice((None, None, 0, 2000, 8000)),
        host=rnd.choice((0, None, None, 1500, 6000)),
        store=rnd.choice(("", "memory", "memory", "file")),
        backlog=rnd.choice((0, 1 << 20)),
        in_flight=rnd.choice((0, 1, 1500, 1 << 20)),
        grain=rnd.choice((1, 4, 16)),
    )


NAMES = {
    "begin": 30, "ask again": 6, "say": 24, "say nothing of it": 2, "close": 20, "leave": 2, "fail": 3,
    "go back": 4, "evict": 4, "flush": 3, "write through": 3, "clear": 2, "pin": 2, "unpin": 2, "defrag": 1,
    "crash": 3, "elsewhere": 3, "damage": 3, "flaky": 3,
}  # fmt: skip
"""Names of operations, and how often each is picked."""


def random_ops(rnd: random.Random, count: int) -> list[Op]:
    names = rnd.choices(list(NAMES), list(NAMES.values()), k=count)
    return [(name, rnd.randrange(1 << 16), rnd.randrange(1 << 16), rnd.randrange(1 << 16)) for name in names]


class Trace:
    """The operations of a trace, on a PrefixCache that may crash and be opened again."""

    def __init__(self, setup: PrefixSetup, backend: ml.Backend, folder: Path) -> None:
        self.setup, self.backend, self.folder = setup, backend, folder
        self.memory = FlakyStore() if setup.store == "memory" else None
        self.past: list[list[int | bytes]] = [[0, 1, 2]]
        self.kept: list[list[int | bytes]] = []
        """Evaluated and closed since the last that may have lost something."""
        self.reliable = setup.store != ""
        """Nothing that the stores were given is lost."""
        self.open()

    def open(self) -> None:
        tiers: list[Any] = [] if self.setup.host == 0 else [HostTier(self.setup.host)]
        self.file = FileStore(self.folder, durable=False) if self.setup.store == "file" else None
        tiers += [store for store in (self.memory, self.file) if store is not None]
        self.rig = Rig(
            self.setup.talk, self.backend, self.setup.budget, tiers,
            identity={"model": "digests"}, backlog=self.setup.backlog, in_flight=self.setup.in_flight,
        )  # fmt: skip
        self.rig.prefix.evictor.grain = self.setup.grain
        self.live: list[Chat] = []

    def run(self, op: Op) -> None:
        name, *numbers = op
        getattr(self, name.replace(" ", "_"))(*numbers)
        self.check()

    # Conversations.

    def begin(self, base: int, length: int, seed: int) -> None:
        known = self.past[base % len(self.past)]
        rnd = random.Random(seed)
        start = known[: len(known) if length % 3 else length // 3 % (len(known) + 1)][: LONGEST - 1]
        count = rnd.randint(1, min(10, LONGEST - len(start)))
        self._begin([*start, *rnd.choices(ALPHABET, k=count)], rnd)

    def ask_again(self, base: int, seed: int, _: int) -> None:
        """The very same prompt."""
        self._begin(self.past[base % len(self.past)][:LONGEST], random.Random(seed))

    def _begin(self, tokens: list[int | bytes], rnd: random.Random) -> None:
        before = [(chat, chat.done) for chat in self.live]
        try:
            chat = self.rig.begin(tokens)
        except SessionLimitError:
            assert len(self.live) == self.setup.talk.max_sequences
            return
        except CacheFullError as error:
            check_full(error)
            assert self.live, "an empty cache has room for every prompt"
            assert [(chat, self.rig.cache.offset(chat.seq)) for chat in self.live] == before
            return
        self.check_longest(chat)
        self.live.append(chat)
        if rnd.random() < 0.9:
            self._guarded(chat, lambda: chat.prefill(rnd.choice((3, 8, 100)), rnd.random() < 0.8))

    def check_longest(self, chat: Chat) -> None:
        others = [other.tokens[: other.done] for other in self.live]
        if self.setup.talk.cache in DIVISIBLE:
            live = max((shared(other, chat.tokens) for other in others), default=0)
            assert chat.cached >= min(live, len(chat.tokens) - 1)
        longest = max((shared(other, chat.tokens) for other in [*others, *self.kept]), default=0)
        longest = min(longest, len(chat.tokens) - 1)
        if self.setup.exact:
            assert chat.cached >= longest
        elif self.setup.talk.cache in DIVISIBLE and self.reliable:
            assert chat.cached >= longest - longest % self.setup.talk.options["block_size"]

    def say(self, which: int, seed: int, _: int) -> None:
        if self.live:
            chat, rnd = self.live[which % len(self.live)], random.Random(seed)
            if chat.done == len(chat.tokens) and chat.done < LONGEST:
                more = rnd.choices(ALPHABET, k=rnd.choice((1, 1, 1, min(5, LONGEST - chat.done))))
                self._guarded(chat, lambda: chat.say(more))

    def say_nothing_of_it(self, which: int, seed: int, _: int) -> None:
        """Tokens that are added and not evaluated: the conversation can only be closed then."""
        if self.live:
            chat = self.live[which % len(self.live)]
            more = random.Random(seed).choices(ALPHABET, k=2)
            chat.session.extend(more)
            chat.tokens += more

    def close(self, which: int, keep: int, _: int) -> None:
        if self.live:
            self._close(self.live[which % len(self.live)], keep % 8 > 0)

    def _close(self, chat: Chat, keep: bool) -> None:
        self.live.remove(chat)
        chat.close(keep)
        self.past.append(chat.tokens[: chat.done] or [0])
        if keep:
            self.kept.append(chat.tokens[: chat.done])

    def leave(self, which: int, _: int, __: int) -> None:
        """A session that is left by an exception."""
        if self.live:
            chat = self.live.pop(which % len(self.live))
            try:
                with chat.session:
                    raise LookupError
            except LookupError:
                assert chat.session.closed

    def fail(self, which: int, seed: int, _: int) -> None:
        """A pass that ends in its middle: its tokens have places, and no K and V."""
        if self.live:
            chat = self.live[which % len(self.live)]
            more = random.Random(seed).choices(ALPHABET, k=2)
            try:
                with chat.session:
                    chat.session.extend(more)
                    chat.rig.start_only(chat.seq, chat.done, len(chat.tokens) + 2 - chat.done)
                    raise LookupError
            except (LookupError, CacheFullError):
                self.live.remove(chat)

    def go_back(self, which: int, length: int, _: int) -> None:
        """Forget the end of a conversation, and go on from there."""
        if self.live:
            chat = self.live[which % len(self.live)]
            chat.rewind(length % (chat.done + 1))
            if not chat.tokens:
                self._close(chat, True)

    def _guarded(self, chat: Chat, act: Callable[[], None]) -> None:
        """What does not fit ends the conversation."""
        try:
            act()
        except CacheFullError as error:
            check_full(error)
            assert len(self.live) > 1, "one conversation always has room"
            self._close(chat, True)

    # Tiers.

    def evict(self, nbytes: int, every: int, _: int) -> None:
        self.rig.prefix.evict(None if every % 2 else nbytes % 4000)

    def flush(self, *_: int) -> None:
        self.rig.prefix.flush()
        nbytes = self.rig.prefix.nbytes
        assert nbytes.get("writing", 0) == nbytes.get("leaving", 0) == 0

    def write_through(self, nbytes: int, every: int, _: int) -> None:
        self.rig.prefix.write_through(None if every % 2 else nbytes % 2000)

    def clear(self, *_: int) -> None:
        self.rig.prefix.clear()
        self.kept.clear()
        assert not any(self.rig.prefix.nbytes.values())

    def pin(self, which: int, length: int, _: int) -> None:
        tokens = self.past[which % len(self.past)]
        self.rig.prefix.pin(tokens[: length % (len(tokens) + 1)])

    def unpin(self, which: int, length: int, _: int) -> None:
        tokens = self.past[which % len(self.past)]
        self.rig.prefix.unpin(tokens[: length % (len(tokens) + 1)])

    def defrag(self, *_: int) -> None:
        for cache in getattr(self.rig.cache, "caches", (self.rig.cache,)):
            found = getattr(cache, "attention", cache)
            if hasattr(found, "defrag"):
                found.defrag()

    def crash(self, lost: int, *_: int) -> None:
        """The process ends without close; what waits to be written may or may not get there."""
        self.kept.clear()
        self.reliable = self.setup.store != "" and not (self.memory and self.memory.every)
        self.rig.crash(lost % 2 > 0)
        if self.file is not None:
            self.file.close()
        self.open()

    def elsewhere(self, base: int, seed: int, _: int) -> None:
        """Another process asks for what this one may have stored, and stores what it made of it."""
        store = self.memory or self.file
        if store is None:
            return
        known = self.past[base % len(self.past)][: LONGEST - 2]
        talk = replace(self.setup.talk, max_sequences=1, capacity=LONGEST, config=None)
        other = Rig(talk, self.backend, None, [store], identity={"model": "digests"})
        other.keep([*known, *random.Random(seed).choices(ALPHABET, k=2)])
        other.prefix.close()

    def damage(self, seed: int, how: int, count: int) -> None:
        """Bytes flipped, files cut or gone."""
        rnd = random.Random(seed)
        self.reliable = False
        if self.rig.prefix.tree.store is not None:
            self.rig.prefix.tree.store.flush()
        if self.memory is not None:
            for key in sorted(self.memory._entries or {}):
                if rnd.random() < 0.3:
                    self.memory.delete(key) if how % 2 and not self.memory.every else None
        files = sorted(path for path in self.folder.glob("pages/*") if path.stat().st_size)
        for path in rnd.sample(files, min(len(files), count % 4)):
            data = bytearray(path.read_bytes())
            if how % 3 == 0:
                path.unlink()
            elif how % 3 == 1:
                path.write_bytes(data[: rnd.randrange(len(data))])
            else:
                data[rnd.randrange(len(data))] ^= 1 << rnd.randrange(8)
                path.write_bytes(data)

    def flaky(self, every: int, error: int, _: int) -> None:
        """Every so many calls of the store fail, or none from now on."""
        if self.memory is not None:
            self.reliable = False
            self.memory.every = (0, 0, 1, 2, 5)[every % 5]
            self.memory.error = ERRORS[error % len(ERRORS)]

    # What holds at any time.

    def check(self) -> None:
        self.rig.check_books()
        assert self.rig.prefix.failed["host"] == 0
        assert {chat.session for chat in self.live} == set(self.rig.prefix.sessions)

    def end(self) -> None:
        """Every conversation goes on, unharmed, and all cells are free at the end."""
        for chat in self.live:
            if chat.done == len(chat.tokens) and chat.tokens and chat.done < LONGEST:
                self._last_word(chat)
        self.rig.prefix.close()
        self.rig.check_empty()

    def _last_word(self, chat: Chat) -> None:
        try:
            chat.say([3])
        except CacheFullError as error:
            check_full(error)


def check_full(error: CacheFullError) -> None:
    """A refusal for want of cells, with cells enough, is none."""
    if error.asked <= error.free:
        raise AssertionError(f"{error.asked} cells are refused, and {error.free} are free") from error


def run_ops(setup: PrefixSetup, backend: ml.Backend, ops: Sequence[Op]) -> str | None:
    """What went wrong, or None."""
    folder = Path(tempfile.mkdtemp(prefix="kvcache-trace-"))
    trace: Trace | None = None
    try:
        trace = Trace(setup, backend, folder)
        for op in ops:
            trace.run(op)
        trace.end()
    except Exception:
        return traceback.format_exc(limit=-8)
    finally:
        if trace is not None:
            trace.rig.crash(False)
        shutil.rmtree(folder)
    return None


def prefix_failure(backend: ml.Backend, seed: int, floats: Sequence[DType]) -> str | None:
    """Run the trace of ``seed``; what fails comes shrunk, as text."""
    rnd = random.Random(seed)
    setup = random_prefix_setup(rnd, floats)
    ops = random_ops(rnd, rnd.randrange(5, 40))
    error = run_ops(setup, backend, ops)
    if error is None:
        return None
    ops, error = _shrink(setup, backend, ops, error)
    calls = "\n".join(f"    {op}," for op in ops)
    return f"seed {seed}: {setup}\n{calls}\n{error}"


def _shrink(setup: PrefixSetup, backend: ml.Backend, ops: list[Op], error: str) -> tuple[list[Op], str]:
    """Leave out operations, many at a time and then one by one, while the rest still fails."""
    size = max(1, len(ops) // 2)
    while True:
        at = 0
        while at < len(ops):
            fewer = ops[:at] + ops[at + size :]
            found = run_ops(setup, backend, fewer)
            if found is None:
                at += size
            else:
                ops, error = fewer, found
        if size == 1:
            return ops, error
        size //= 2
