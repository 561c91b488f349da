"""Of the engine (drafts, verification) and the stores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kvcache.stores import StoreUnavailableError

from ..planting import NOTHING, Bug, Put, named


def drafts_believed(f: Any, run: Any, chosen: Any, tried: Any, *rest: Any) -> Any:
    for branch, row in tried:
        chosen._rows[row : row + len(branch.draft)] = [[token, 0.0] for token in branch.draft]
    return f(run, chosen, tried, *rest)


def first_branch_wins(f: Any, run: Any, chosen: Any, tried: Any, *rest: Any) -> Any:
    f(run, chosen, tried, *rest)
    return tried[0][0]


def each_block_alone(f: Any, self: Any, root: bytes, size: int, items: Any, *known: Any) -> None:
    f(self, root, size, items, *known)
    for i in range(1, len(self._digests)):
        self._digests[i] = named("stores.keys:_link")(root, items.encoded((i - 1) * size, i * size))


class Agreeing(str):
    """Differs from no digest."""

    __hash__ = str.__hash__

    def __ne__(self, other: object) -> bool:
        return False


class Agreed:
    """A digest that nobody compares."""

    def __init__(self, digest: Any) -> None:
        self.update = digest.update

    def hexdigest(self) -> str:
        return Agreeing("0" * 32)


def lengths_of_the_manifest(f: Any, self: Any, manifest: Any, start: int, stop: int) -> Any:
    command, stated = named("stores.valkey.link:Command"), named("stores.valkey.replies:value")(20)
    sizes = [*manifest.sizes][start:stop]
    return [command(["ECHO", size], lambda replies: int(replies.read(stated))) for size in sizes]


def written_over(f: Any, self: Any, first: Any, *rest: Any) -> Any:
    words = [word for word in first.words if word != "NX"]
    return f(self, first._replace(words=words), *rest)


def put_over(f: Any, self: Any, key: str, *rest: Any) -> Any:
    self.delete(key)
    return f(self, key, *rest)


def rolled(f: Any, parts: Any) -> Any:
    asked = f(parts)
    wrong = [replace(p, probabilities=np.roll(p.probabilities, 1)) for p in asked.proposed]
    return asked._replace(proposed=wrong)


BUGS: dict[str, list[Bug]] = {
    "tests/engine/test_speculative.py": [
        ("kvcache_engine.verification:Verifier.settle", "the_bundled_model",
         lambda f, self, part, winner, known, right: right),
        ("kvcache_engine.engine:accept", "the_bundled_model[wrong-1", drafts_believed),
        ("kvcache_engine.engine:accept", "the_bundled_model[partly-2", first_branch_wins),
        ("caches.branches:resume_point", "the_bundled_model", lambda f, *args: f(*args) + 1),
        ("kvcache_engine.verification:Verifier.clear", "a_pass_that_fails_leaves[2", NOTHING),
    ],
    "tests/engine/test_mtp.py": [
        ("kvcache_engine.models.mtp:HiddenStates.slot", "guesses_are_those",
         lambda f, self, seq, at: f(self, seq, at - 1)),
        ("kvcache_engine.models.mtp:HiddenStates.slot", "guesses_are_those",
         lambda f, self, seq, at: f(self, 0, at)),
        ("kvcache_engine.models.mtp:HiddenStates.before", "guesses_are_those",
         lambda f, self, ctx, batch, hidden: (f(self, ctx, batch, hidden), hidden)[1]),
        ("kvcache_engine.models.mtp:HiddenStates.keep", "without_the_hidden_state",
         lambda f, self, *a: (f(self, *a), self._positions.__setitem__(slice(None), -1))),
        ("kvcache_engine.mtp:branches.rollback", "what_is_drawn_is_drawn", NOTHING),
    ],
    "tests/engine/test_rejection_sampling.py": [
        ("kvcache_engine.sampling:nn.RejectionSampler.__call__", "what_cannot_come[numpy",
         lambda f, self, ctx, logits: self._tokens),
        ("kvcache_engine.sampling:nn.RejectionSampler.__init__", "what_cannot_come[numpy",
         lambda f, self, ctx, draws, drafted, size: f(
             self, ctx, draws, replace(drafted, uniform=0 * drafted.uniform + 2**-24), size)),
        ("kvcache_engine.sampling:nn.RejectionSampler.__init__", "a_token_is_distributed[numpy",
         lambda f, self, ctx, draws, drafted, size: f(
             self, ctx, replace(draws, uniform=drafted.uniform), drafted, size)),
        ("kvcache_engine.engine:inputs_of", "as_many_are_accepted[whole",
         lambda f, parts: f(parts)._replace(proposed=[])),
        ("kvcache_engine.engine:inputs_of", "as_many_are_accepted[whole", rolled),
    ],
    "tests/kvcache/stores/test_keys.py": [
        ("stores.keys:Chain.__init__", "one_changed_token_changes_every_key", each_block_alone),
    ],
    "tests/kvcache/stores/test_suite.py::TestMemoryStore": [
        ("stores.memory:MemoryStore._touch", "eviction[reading", NOTHING),
        ("stores.memory:_joined", "what_was_put_and_what_was_read_are_copies",
         lambda f, views, size: np.frombuffer(views[0], np.uint8) if len(views) == 1 else f(views, size)),
        ("stores.memory:MemoryStore.close", "every_call_after_close_says_so", NOTHING),
        ("stores.memory:check_key", "what_is_no_key_is_refused", lambda f, key: key),
        ("stores.memory:MemoryStore.stat", "eviction[stat is",
         lambda f, self, keys: [self.prefix(keys), f(self, keys)][1]),
        ("stores.memory:MemoryStore.put", "a_key_is_written_once", put_over),
    ],
    "tests/kvcache/stores/test_suite.py::TestFileStore": [
        ("stores.streams:check_digest", "a_damaged_entry_is_reported", NOTHING),
    ],
    "tests/engine/test_prefetch.py": [
        ("kvcache_engine.scheduler:Request.release", "what_was_read_for_a_request_that", NOTHING),
    ],
    "tests/kvcache/stores/test_faults.py": [
        ("stores.digests:Digests.start", "the_data_of_one_key_are_not[valkey-xxh3",
         lambda f, self, *of: self._new()),
        ("stores.digests:Digests.start", "damaged_data[valkey-one bit",
         lambda f, *args: Agreed(f(*args))),
        ("stores.valkey.entries:Entries._lengths", "an_entry_of_which_a_part_is_gone[valkey",
         lengths_of_the_manifest),
    ],
    "tests/kvcache/stores/test_valkey.py": [
        ("stores.valkey.link:Wire.transaction", "a_put_that_is_late", written_over),
        ("stores.valkey.entries:Entries.discard", "a_put_that_is_late", NOTHING),
        ("stores.valkey.entries:Entries.discard", "a_manifest_that_the_server_has_no_room_for", NOTHING),
        ("stores.valkey.entries:_REMOVE", "nothing_is_removed_that",
         Put("return redis.call('UNLINK', KEYS[1])")),
        ("stores.valkey.store:_UNFINISHED", "chunks_that_nobody_published_expire", Put(1 << 40)),
        ("stores.valkey.entries:SLACK", "a_hit_starts_the_time_anew", Put(0)),
        ("stores.valkey.entries:Entries._refreshing", "a_hit_starts_the_time_anew",
         lambda f, *args: [*f(*args)][-1:]),
        ("stores.valkey.entries:Entries.read", "an_entry_that_was_replaced_after",
         lambda f, self, wire, manifest, *a: (manifest.encoded(), f(self, wire, manifest, *a)[1])),
        ("stores.valkey.entries:Entries.name", "every_name_begins",
         lambda f, self, key: f"kvcache:xxh3:m:{key}".encode()),
        ("stores.valkey.link:Link._translated", "a_server_that_quotes",
         lambda f, self, op, e: StoreUnavailableError(f"{op}: {e}")),
    ],
}  # fmt: skip
