"""mlx-lm's models on our prompt caches, mode by mode, against its own caches and against no cache at all.

    python -m benchmarks.census mlx-lm [--type NAME ...] [--render]

Every type is built small with random weights and runs in a process of its own. In each mode the
log-probabilities after every token are compared with those that mlx-lm's own caches give, and with those of a
run without any cache:

    =        ours are mlx-lm's
    right    ours are those of no cache, where mlx-lm's own differ from them or raise
    theirs   mlx-lm's own are not those of no cache, or raise, and ours neither
    refused  ours raise one of their errors, which says why
    wrong    anything else: what is to be mended

``--render`` writes the tables of docs/embedding-mlx-lm.md.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import cache as own

import ml
from benchmarks.census import mlx_lm_types as small
from kvcache.integrations import mlx_lm as ours

__all__ = ["MODES", "Case", "examine", "main"]

TOLERANCE = 1e-5
"""Of log-probabilities, relative to the largest: sums in another order round differently."""
Seen = list[tuple[tuple[int, ...], mx.array]]
"""After which tokens of a row, and the log-probabilities of the next."""


NOT_TRIMMABLE = "not trimmable"


class Interrupted(Exception):  # noqa: N818
    """What is raised in the middle of a pass."""


class Case:
    """One model, the pool that its prompt caches of ours come from, and what a run without a cache gives."""

    def __init__(self, name: str) -> None:
        self.model = small.build(name)
        self.reference = cache(self._reference)
        self.one_pass = False
        """Whether the model needs a cache, so that one pass over an empty one of mlx-lm's stands for none."""

    def prepare(self) -> None:
        """See mlx-lm's own caches and no cache agree; raises what keeps mlx-lm from it."""
        tokens = draw(20)
        cached = self.feed(own.make_prompt_cache(self.model), (), tokens)
        try:
            plain = self.model(mx.array([tokens]))
            mx.eval(plain)
        except Exception:
            self.one_pass = True
        else:
            self.one_pass = far(_log(plain[0]), [x for _, x in cached]) > TOLERANCE

    def _reference(self, tokens: tuple[int, ...]) -> mx.array:
        found = own.make_prompt_cache(self.model) if self.one_pass else None
        return _log(self.model(mx.array([tokens]), cache=found)[0, -1])

    def feed(self, prompt_cache: Any, before: Sequence[int], tokens: Sequence[int]) -> Seen:
        logits = self.model(mx.array([list(tokens)]), cache=prompt_cache)[0]
        mx.eval(logits)
        return [((*before, *tokens[: i + 1]), _log(row)) for i, row in enumerate(logits)]


def draw(count: int, seed: int = 0) -> list[int]:
    return [int(x) for x in np.random.default_rng(seed).integers(1, small.VOCABULARY, count)]


def _log(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


class Theirs:
    """mlx-lm's own prompt caches."""

    def __init__(self, case: Case) -> None:
        self.model = case.model

    def make(self) -> list[Any]:
        found: list[Any] = own.make_prompt_cache(self.model)
        return found

    def back(self, prompt_cache: Any, position: int, length: int) -> int:
        if own.trim_prompt_cache(prompt_cache, length - position) != length - position:
            raise NotImplementedError(NOT_TRIMMABLE)
        return position

    def load(self, file: str) -> Any:
        return own.load_prompt_cache(file)

    def recover(self, prompt_cache: Any, position: int) -> tuple[Any, int]:
        return self.make(), 0


class Ours(Theirs):
    """Prompt caches of one small pool, among those of strangers."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.pool = ours.CachePool(
            case.model, capacity=64, max_sequences=8, rollback=6, checkpoint_interval=4, max_batch=96
        )

    def make(self) -> list[Any]:
        return self.pool.make_prompt_cache()

    def back(self, prompt_cache: Any, position: int, length: int) -> int:
        if own.can_trim_prompt_cache(prompt_cache):
            return super().back(prompt_cache, position, length)
        return ours.rewind(prompt_cache, position)

    def load(self, file: str) -> Any:
        return ours.load_prompt_cache(file, self.pool)

    def recover(self, prompt_cache: Any, position: int) -> tuple[Any, int]:
        return prompt_cache, ours.rewind(prompt_cache, position)


def alone(case: Case, side: Theirs) -> Seen:
    """generate_step, greedy, the prompt at once."""
    prompt, seen = tuple(draw(11)), []
    for token, logs in generate_step(mx.array(prompt), case.model, prompt_cache=side.make(), max_tokens=14):
        seen.append((prompt, logs))
        prompt = (*prompt, int(token))
    return seen


def batch(case: Case, side: Theirs) -> Seen:
    """Ragged rows that leave at different times, in chunks of 4; another joins in the middle."""
    prompts = [draw(count, seed=count) for count in (5, 13, 9, 3)]
    generator = BatchGenerator(case.model, completion_batch_size=3, prefill_batch_size=2, prefill_step_size=4)
    uids = generator.insert(prompts, [9, 4, 7, 5], caches=[side.make() for _ in prompts])
    rows, seen = {uid: tuple(row) for uid, row in zip(uids, prompts, strict=True)}, []
    while responses := generator.next_generated():
        for response in sorted(responses, key=lambda response: response.uid):
            seen.append((rows[response.uid], response.logprobs))
            rows[response.uid] += (int(response.token),)
    generator.close()
    return seen


def chunks(case: Case, side: Theirs) -> Seen:
    prompt_cache, tokens = side.make(), draw(30, seed=3)
    bounds = (0, 5, 6, 12, 13, 14, 23, 25, 30)
    parts = itertools.pairwise(bounds)
    return [x for a, b in parts for x in case.feed(prompt_cache, tokens[:a], tokens[a:b])]


def trim(case: Case, side: Theirs) -> Seen:
    """Five tokens are taken back, within what windows hold, and once more beyond them."""
    prompt_cache, tokens = side.make(), draw(9, seed=4)
    seen = case.feed(prompt_cache, (), tokens[:6])
    seen += case.feed(prompt_cache, tokens[:6], tokens[6:])
    for length, position in ((9, 4), (24, 19)):
        at = side.back(prompt_cache, position, length)
        tokens = tokens[:position] + draw(24 - position, seed=length)
        case.feed(prompt_cache, tokens[:at], tokens[at:position]) if at < position else None
        for i in range(position, 24, 5):
            seen += case.feed(prompt_cache, tokens[:i], tokens[i : i + 5])
    return seen


def fork(case: Case, side: Theirs) -> Seen:
    """A deep copy and its original go on in turns, by other tokens."""
    prompt_cache, tokens = side.make(), draw(10, seed=5)
    seen = case.feed(prompt_cache, (), tokens)
    rows = [(prompt_cache, list(tokens)), (copy.deepcopy(prompt_cache), list(tokens))]
    for step, count in enumerate((1, 4, 1, 1)):
        for i, (one, said) in enumerate(rows):
            new = draw(count, seed=10 * step + i)
            seen += case.feed(one, said, new)
            said += new
    return seen


def _saved(case: Case, writer: Theirs, reader: Theirs) -> Seen:
    seen = []
    for count in (4, 17):
        prompt_cache, tokens = writer.make(), draw(count, seed=6)
        case.feed(prompt_cache, (), tokens[:-2])
        for i in (count - 2, count - 1):
            seen += case.feed(prompt_cache, tokens[:i], tokens[i : i + 1])
        with tempfile.TemporaryDirectory() as folder:
            file = f"{folder}/prompt.safetensors"
            own.save_prompt_cache(file, prompt_cache)
            again = reader.load(file)
            for new in (draw(1, seed=7), draw(5, seed=8), draw(1, seed=9)):
                seen += case.feed(again, tokens, new)
                tokens += new
    return seen


def save(case: Case, side: Theirs) -> Seen:
    return _saved(case, side, side)


def handed_over(case: Case, side: Theirs) -> Seen:
    """Files of one side, read by the other."""
    return _saved(case, side, Theirs(case)) + _saved(case, Theirs(case), side)


def interrupt(case: Case, side: Theirs) -> Seen:
    """A pass fails at an entry in the middle, and at the last one; what was there before goes on."""
    prompt_cache, tokens = side.make(), draw(11, seed=12)
    seen = case.feed(prompt_cache, (), tokens)
    for i in (len(prompt_cache) // 2, len(prompt_cache) - 1):
        broken = list(prompt_cache)
        broken[i] = _Failing(prompt_cache[i])
        for count in (3, 1):
            with suppress(Interrupted):
                case.feed(broken, tokens, draw(count, seed=13))
            prompt_cache, at = side.recover(prompt_cache, len(tokens))
            case.feed(prompt_cache, tokens[:at], tokens[at:]) if at < len(tokens) else None
        new = draw(4, seed=i)
        seen += case.feed(prompt_cache, tokens, new)
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
        if name == "update_and_fetch":
            raise Interrupted
        return getattr(self._entry, name)

    def __getitem__(self, idx: int) -> Any:
        return self._entry[idx]

    def __setitem__(self, idx: int, value: Any) -> None:
        raise Interrupted


MODES: dict[str, Callable[[Case, Theirs], Seen]] = {
    "alone": alone,
    "batch": batch,
    "chunks": chunks,
    "trim": trim,
    "copy": fork,
    "save": save,
    "other's files": handed_over,
    "exception": interrupt,
}


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


def judge(case: Case, side: Theirs, mode: str) -> tuple[str, str]:
    """What became of one mode, and how far off it is or what was said."""
    found: list[Any] = []
    for one in (side, Theirs(case)):
        try:
            found.append(MODES[mode](case, one))
        except Exception as error:
            error.__traceback__ = None
            found.append(error)
    mine, theirs = found
    told = repr(theirs) if isinstance(theirs, Exception) else ""
    if isinstance(mine, Exception):
        said = f"{type(mine).__name__}: {' '.join(str(mine).split())}"
        if isinstance(mine, ml.MLError):
            return "refused", said
        return "theirs" if type(theirs) is type(mine) else "wrong", said
    plain, exact = _apart(case, mine)
    if told:
        return "right" if plain <= TOLERANCE else "wrong", told
    if [tokens for tokens, _ in mine] == [tokens for tokens, _ in theirs]:
        exact = far([x for _, x in mine], [x for _, x in theirs])
    if exact <= TOLERANCE:
        return "=", f"{exact:.0e}" + ("" if plain <= TOLERANCE else f"; no cache is {plain:.0e} away")
    away = _apart(case, theirs)[0]
    told = f"mlx-lm's own is {away:.0e} from a run without a cache, ours {plain:.0e}"
    return "right" if plain <= TOLERANCE else "theirs" if away > TOLERANCE else "wrong", told


def _apart(case: Case, seen: Seen) -> tuple[float, float]:
    """How far from a run without a cache; infinity."""
    return far([x for _, x in seen], [case.reference(tokens) for tokens, _ in seen]), float("inf")


def examine(
    name: str, modes: Sequence[str] = tuple(MODES), say: Callable[[str], Any] = lambda _: None
) -> dict[str, Any]:
    """What became of a type: its "layers", and "modes", {mode: (verdict, words)}, or "outcome" and "told".

    ``say`` hears who is at work: "mlx-lm" alone first, then "ours".
    """
    say("mlx-lm")
    try:
        case = Case(name)
        case.prepare()
    except Exception as error:
        return {"outcome": "theirs", "told": f"{type(error).__name__}: {error}"}
    kinds = Counter(type(entry).__name__ for entry in own.make_prompt_cache(case.model))
    layers = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    say("ours")
    try:
        side = Ours(case)
    except ml.MLError as error:
        return {"layers": layers, "outcome": "refused", "told": str(error)}
    found = {mode: judge(case, side, mode) for mode in modes}
    if side.pool.free_sequences != side.pool.sequences.max_sequences:
        found["leak"] = ("wrong", f"{side.pool.free_sequences} sequences are free in the end")
    return {"layers": layers, "outcome": "run", "modes": found, "one_pass": case.one_pass}


def isolated(names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each in a process of its own: some of the types end theirs."""
    for name in names:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(reader)
            with os.fdopen(writer, "w") as out, redirect_stdout(sys.stderr):

                def say(line: str) -> None:
                    print(line, file=out, flush=True)

                say(json.dumps(examine(name, say=say)))
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as lines:
            said = lines.read().splitlines()
        status = os.waitpid(child, 0)[1]
        if not status:
            yield name, json.loads(said[-1])
        else:
            outcome = "theirs" if said[-1:] == ["mlx-lm"] else "wrong"
            yield name, {"outcome": outcome, "told": f"the process ends with signal {status & 127}"}


# The page.

PAGE = Path(__file__).resolve().parents[2] / "docs" / "embedding-mlx-lm.md"
MARKS = "<!-- census -->", "<!-- end of the census -->"


def render(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Types with the same verdicts in one row; then what is said of those that are not "="."""
    rows: dict[tuple[str, ...], list[str]] = {}
    said: dict[str, list[str]] = {}
    for name, found in results.items():
        everywhere = "modes" not in found
        modes = dict.fromkeys(MODES, (found["outcome"], found["told"])) if everywhere else found["modes"]
        rows.setdefault(tuple(kind for kind, _ in modes.values()), []).append(f"`{name}`")
        for words, places in _told(modes).items():
            where = "" if everywhere else f"{', '.join(places)}: "
            said.setdefault(f"{where}{words}", []).append(f"`{name}`")
        if found.get("one_pass"):
            said.setdefault(ONE_PASS, []).append(f"`{name}`")
    order = sorted(rows.items(), key=lambda row: -len(row[1]))
    lines = [f"| types | {' | '.join(MODES)} |", "|---" * (1 + len(MODES)) + "|"]
    lines += [f"| {', '.join(names)} | {' | '.join(kinds)} |" for kinds, names in order]
    lines += ["", "| types | what is said |", "|---|---|"]
    lines += [f"| {', '.join(names)} | {words} |" for words, names in said.items()]
    return "\n".join(lines)


ONE_PASS = "needs a cache: one pass over an empty one of mlx-lm's stands for none"


def _told(modes: Mapping[str, tuple[str, str]]) -> dict[str, list[str]]:
    """What is worth saying, up to the advice, and of which modes; other figures are no other words."""
    first: dict[str, str] = {}
    found: dict[str, list[str]] = {}
    for mode, (kind, words) in modes.items():
        if (kind != "=" or ";" in words) and NOT_TRIMMABLE not in words:
            line = words if kind == "=" else words.partition("; ")[0]
            found.setdefault(first.setdefault(re.sub(r"\d", "", line), line), []).append(mode)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.census mlx-lm", description=__doc__)
    parser.add_argument(
        "--type", action="append", default=[], help="this type alone; may be given several times"
    )
    parser.add_argument("--render", action="store_true", help="write the tables of the page; for all types")
    options = parser.parse_args(arguments)
    if options.type and options.render:
        parser.error("--render is for all types")
    results, wrong = {}, 0
    for name, found in isolated(options.type or small.types()):
        results[name] = found
        print(f"{name}: {found.get('layers', '')}", flush=True)
        for mode, (kind, words) in found.get("modes", {"": (found["outcome"], found.get("told"))}).items():
            print(f"    {mode:14} {kind:8} {words}", flush=True)
            wrong += kind == "wrong"
    if options.render:
        text, (begin, end) = PAGE.read_text(encoding="utf-8"), MARKS
        table = f"{begin}\n{render(results)}\n{end}"
        PAGE.write_text(re.sub(f"{begin}.*{end}", lambda _: table, text, flags=re.DOTALL), encoding="utf-8")
    print(f"{len(results)} types, {wrong} wrong")
    return bool(wrong)
