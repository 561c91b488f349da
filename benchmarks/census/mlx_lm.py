"""mlx-lm's models in the modes of its prompt caches."""

from __future__ import annotations

import copy
import functools
import itertools
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import cache as own

from benchmarks.census import mlx_lm_types as small
from kvcache.integrations import mlx_lm as integration

types = small.types
CANNOT: dict[str, str] = {}
TOLERANCE, SEQUENCES = 1e-5, 8
"""Of log-probabilities, relative to the largest: sums in another order round differently."""
Seen = list[tuple[tuple[int, ...], mx.array]]
"""After which tokens of a row, and the log-probabilities of the next."""


def quiet() -> None:
    """mlx-lm says nothing."""


class Interrupted(Exception):  # noqa: N818
    """What is raised in the middle of a pass."""


class LeakError(Exception):
    """Sequences that are not free after a mode."""


class Case:
    """One model; raises what keeps mlx-lm's own caches from running it."""

    def __init__(self, name: str) -> None:
        self.model = small.build(name)
        self._known: dict[tuple[int, ...], mx.array] = {}
        tokens = draw(20)
        cached = feed(self.model, own.make_prompt_cache(self.model), (), tokens)
        self.one_pass = False
        """Whether the model needs a cache, so that one pass over an empty one of mlx-lm's stands for none."""
        try:
            plain = self.model(mx.array([tokens]))
            mx.eval(plain)
        except Exception:
            self.one_pass = True
        else:
            self.one_pass = far(_log(plain[0]), [x for _, x in cached]) > TOLERANCE

    @functools.cached_property
    def pool(self) -> integration.CachePool:
        """A small one, for prompt caches among those of others."""
        return integration.CachePool(
            self.model, capacity=64, max_sequences=SEQUENCES, rollback=6, checkpoint_interval=4, max_batch=96
        )

    def reference(self, rows: Sequence[tuple[int, ...]]) -> list[mx.array]:
        """After each of these, the log-probabilities of the next token, of one pass without a cache."""
        for tokens in sorted(rows, key=len, reverse=True):  # one pass tells those of all beginnings too
            if tokens not in self._known:
                found = own.make_prompt_cache(self.model) if self.one_pass else None
                self._known.update(feed(self.model, found, (), tokens))
        return [self._known[tokens] for tokens in rows]


def feed(model: Any, prompt_cache: Any, before: Sequence[int], tokens: Sequence[int]) -> Seen:
    logits = model(mx.array([list(tokens)]), cache=prompt_cache)[0]
    mx.eval(logits)
    return [((*before, *tokens[: i + 1]), _log(row)) for i, row in enumerate(logits)]


def draw(count: int, seed: int = 0) -> list[int]:
    return [int(x) for x in np.random.default_rng(seed).integers(1, small.VOCABULARY, count)]


def _log(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


class Theirs:
    """mlx-lm's own prompt caches."""

    def __init__(self, case: Case) -> None:
        self.case, self.model, self.feed = case, case.model, functools.partial(feed, case.model)

    def make(self) -> list[Any]:
        return own.make_prompt_cache(self.model)

    def back(self, prompt_cache: Any, position: int, length: int) -> int:
        if own.trim_prompt_cache(prompt_cache, length - position) != length - position:
            raise NotImplementedError
        return position

    def load(self, file: str) -> Any:
        return own.load_prompt_cache(file)

    def recover(self, prompt_cache: Any, position: int) -> tuple[Any, int]:
        return self.make(), 0


class Ours(Theirs):
    """Prompt caches of the case's pool."""

    def make(self) -> list[Any]:
        return self.case.pool.make_prompt_cache()

    def back(self, prompt_cache: Any, position: int, length: int) -> int:
        if own.can_trim_prompt_cache(prompt_cache):
            return super().back(prompt_cache, position, length)
        return integration.rewind(prompt_cache, position)

    def load(self, file: str) -> Any:
        return integration.load_prompt_cache(file, self.case.pool)

    def recover(self, prompt_cache: Any, position: int) -> tuple[Any, int]:
        return prompt_cache, integration.rewind(prompt_cache, position)


def alone(side: Theirs) -> Seen:
    """generate_step, greedy, the prompt at once."""
    prompt, seen = tuple(draw(11)), []
    for token, logs in generate_step(mx.array(prompt), side.model, prompt_cache=side.make(), max_tokens=14):
        seen.append((prompt, logs))
        prompt = (*prompt, int(token))
    return seen


def batch(side: Theirs) -> Seen:
    """Ragged rows that leave at different times, in passes of 4, padded; another joins in the middle."""
    prompts = [draw(count, seed=count) for count in (2, 12, 9, 4, 3)]
    generator = BatchGenerator(side.model, completion_batch_size=4, prefill_batch_size=3, prefill_step_size=4)
    uids = generator.insert(prompts, [9, 4, 7, 5, 3], caches=[side.make() for _ in prompts])
    rows, seen = {uid: tuple(row) for uid, row in zip(uids, prompts, strict=True)}, []
    while responses := generator.next_generated():
        for response in sorted(responses, key=lambda response: response.uid):
            seen.append((rows[response.uid], response.logprobs))
            rows[response.uid] += (int(response.token),)
    generator.close()
    return seen


class Rows:
    """A batch as mlx-lm's loops make one, of rows of what ``said`` tells each holds."""

    def __init__(self, side: Theirs, said: Sequence[Sequence[int]]) -> None:
        self.model, self.said, self.seen = side.model, [list(tokens) for tokens in said], list[Any]()
        several = [side.make() for _ in said]
        for prompt_cache, tokens in zip(several, said, strict=True):
            side.feed(prompt_cache, (), tokens) if tokens else None
        self.entries = [type(of_one[0]).merge(of_one) for of_one in zip(*several, strict=True)]

    def feed(self, counts: Sequence[int], *sizes: int, left: bool = False) -> None:
        """So many new tokens of each row, in passes of these sizes, padded at the right or left."""
        width = max(counts)
        new = [draw(count, seed=100 * len(self.seen) + row) for row, count in enumerate(counts)]
        padding = [width - count for count in counts]
        if any(padding):
            announced = {"lengths": list(counts), "right_padding": padding}
            for entry in itertools.chain.from_iterable(getattr(x, "caches", (x,)) for x in self.entries):
                if left and type(entry) is own.ArraysCache:
                    entry.left_padding = mx.array(padding)  # for which its prepare has no parameter
                else:
                    entry.prepare(**({"left_padding": padding} if left else announced))
        begins = padding if left else [0] * len(counts)
        columns = np.zeros((len(counts), width), np.int32)
        for row, begin, tokens in zip(columns, begins, new, strict=True):
            row[begin : begin + len(tokens)] = tokens
        at = 0
        for size in sizes or (width,):
            logits = self.model(mx.array(columns[:, at : at + size]), cache=self.entries)
            mx.eval(logits)
            for row, (begin, tokens) in enumerate(zip(begins, new, strict=True)):
                for i in range(max(at, begin), min(at + size, begin + len(tokens))):
                    told = (*self.said[row], *tokens[: i - begin + 1])
                    self.seen.append((told, _log(logits[row, i - at])))
            at += size
        for said, tokens in zip(self.said, new, strict=True):
            said += tokens
        if any(padding) and not left:
            for entry in self.entries:
                entry.finalize()

    def filter(self, keep: list[int]) -> None:
        for entry in self.entries:
            entry.filter(keep)
        self.said = [self.said[row] for row in keep]

    def extend(self, other: Rows) -> None:
        for entry, theirs in zip(self.entries, other.entries, strict=True):
            entry.extend(theirs)
        self.said, self.seen = self.said + other.said, self.seen + other.seen


def padding(side: Theirs) -> Seen:
    """Rows padded at the right in the first pass and in later ones, in parts; merged, filtered, extended."""
    rows = Rows(side, [(), (), ()])
    rows.feed([3, 9, 1], 4, 1, 4)
    rows.feed([1, 1, 1])
    rows.feed([1, 2, 6], 3, 3)
    rows.filter([2, 0])
    more = Rows(side, [draw(5, seed=21), (), draw(2, seed=22)])
    more.feed([4, 2, 1])
    rows.extend(more)
    rows.feed([2, 1, 7, 1, 3], 5, 2)
    rows.feed([1] * 5)
    return rows.seen


def left(side: Theirs) -> Seen:
    """New rows padded at the left, which go on, and are padded at the right in a later pass."""
    rows = Rows(side, [(), (), ()])
    rows.feed([2, 7, 1], 4, 3, left=True)
    rows.feed([1, 1, 1])
    rows.feed([3, 1, 5], 4, 1)
    rows.filter([1, 2])
    rows.feed([1, 1])
    return rows.seen


def chunks(side: Theirs) -> Seen:
    prompt_cache, tokens = side.make(), draw(30, seed=3)
    parts = itertools.pairwise((0, 5, 6, 12, 13, 14, 23, 25, 30))
    return [x for a, b in parts for x in side.feed(prompt_cache, tokens[:a], tokens[a:b])]


def trim(side: Theirs) -> Seen:
    """Five tokens are taken back, within what windows hold, and once more beyond them."""
    prompt_cache, tokens = side.make(), draw(9, seed=4)
    seen = side.feed(prompt_cache, (), tokens[:6])
    seen += side.feed(prompt_cache, tokens[:6], tokens[6:])
    for length, position in ((9, 4), (24, 19)):
        at = side.back(prompt_cache, position, length)
        tokens = tokens[:position] + draw(24 - position, seed=length)
        side.feed(prompt_cache, tokens[:at], tokens[at:position]) if at < position else None
        for i in range(position, 24, 5):
            seen += side.feed(prompt_cache, tokens[:i], tokens[i : i + 5])
    return seen


def fork(side: Theirs) -> Seen:
    """A deep copy and its original go on in turns, by other tokens."""
    prompt_cache, tokens = side.make(), draw(10, seed=5)
    seen = side.feed(prompt_cache, (), tokens)
    rows = [(prompt_cache, list(tokens)), (copy.deepcopy(prompt_cache), list(tokens))]
    for step, count in enumerate((1, 4, 1, 1)):
        for i, (one, said) in enumerate(rows):
            new = draw(count, seed=10 * step + i)
            seen += side.feed(one, said, new)
            said += new
    return seen


def _saved(writer: Theirs, reader: Theirs) -> Seen:
    seen = []
    for count in (4, 17):
        prompt_cache, tokens = writer.make(), draw(count, seed=6)
        writer.feed(prompt_cache, (), tokens[:-2])
        for i in (count - 2, count - 1):
            seen += writer.feed(prompt_cache, tokens[:i], tokens[i : i + 1])
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder, "prompt.safetensors"))
            own.save_prompt_cache(file, prompt_cache)
            again = reader.load(file)
            for new in (draw(1, seed=7), draw(5, seed=8), draw(1, seed=9)):
                seen += reader.feed(again, tokens, new)
                tokens += new
    return seen


def save(side: Theirs) -> Seen:
    return _saved(side, side)


def handed_over(side: Theirs) -> Seen:
    """Files of one side, read by the other."""
    theirs = Theirs(side.case)
    return _saved(side, theirs) + _saved(theirs, side)


def interrupt(side: Theirs) -> Seen:
    """A pass fails at an entry in the middle, and at the last one; what was there before goes on."""
    prompt_cache, tokens = side.make(), draw(11, seed=12)
    seen = side.feed(prompt_cache, (), tokens)
    for i in (len(prompt_cache) // 2, len(prompt_cache) - 1):
        broken = list(prompt_cache)
        broken[i] = _Failing(prompt_cache[i])
        for count in (3, 1):
            with suppress(Interrupted):
                side.feed(broken, tokens, draw(count, seed=13))
            prompt_cache, at = side.recover(prompt_cache, len(tokens))
            side.feed(prompt_cache, tokens[:at], tokens[at:]) if at < len(tokens) else None
        new = draw(4, seed=i)
        seen += side.feed(prompt_cache, tokens, new)
        tokens += new
    return seen


class _Failing:
    """An entry of a prompt cache that raises where it is written."""

    def __init__(self, entry: Any) -> None:
        self._entry = entry

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return type(self._entry)

    def __getattr__(self, name: str) -> Any:
        if name in ("update_and_fetch", "update_window"):
            raise Interrupted
        return getattr(self._entry, name)

    def __getitem__(self, idx: int) -> Any:
        return self._entry[idx]

    def __setitem__(self, idx: int, value: Any) -> None:
        raise Interrupted


def _on_either(run: Callable[[Theirs], Seen]) -> Callable[[Case, str], Seen]:
    """``run`` with the prompt caches of a side; LeakError where it leaves sequences of ours not free."""

    def mode(case: Case, which: str) -> Seen:
        found = run((Ours if which == "ours" else Theirs)(case))
        if which == "ours" and case.pool.free_sequences != SEQUENCES:
            raise LeakError(f"{case.pool.free_sequences} of {SEQUENCES} sequences are free in the end")
        return found

    return mode


MODES = {
    name: _on_either(run)
    for name, run in {
        "alone": alone, "batch": batch, "padding": padding, "left padding": left, "chunks": chunks,
        "trim": trim, "copy": fork, "save": save, "other's files": handed_over, "exception": interrupt,
    }.items()
}  # fmt: skip


def far(one: Sequence[mx.array] | mx.array, other: Sequence[mx.array] | mx.array) -> float:
    """The largest difference of log-probabilities, relative to the largest of them."""
    most = 0.0
    for mine, theirs in zip(one, other, strict=True):
        x, y = np.array(mine, np.float32), np.array(theirs, np.float32)
        known = ~((x == y) & np.isinf(y))  # some models say -inf of tokens that are none
        x, y = x[known], y[known]
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            return float("inf")
        most = max(most, float(np.abs(x - y).max() / max(1.0, np.abs(y).max())))
    return most


def agree(one: Seen, other: Seen) -> bool | None:
    alike = [tokens for tokens, _ in one] == [tokens for tokens, _ in other]
    return (alike and far([x for _, x in one], [x for _, x in other]) <= TOLERANCE) or None


def is_right(case: Case, mode: str, found: Seen) -> bool:
    return far([x for _, x in found], case.reference([tokens for tokens, _ in found])) <= TOLERANCE
