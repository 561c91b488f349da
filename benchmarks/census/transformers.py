"""transformers' models with our caches, mode by mode, against its own caches and against no cache at all.

    python -m benchmarks.census transformers [--type NAME ...] [--results FILE] [--render]

Every type that writes text is built small with random weights. In each mode it runs without a cache, with
transformers' own and with ours. What is found of a type is added to the results; types that are there are not
run again. ``--render`` writes the table of docs/embedding-transformers.md from them.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import inspect
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import ml
from benchmarks.census import transformers_types as small
from kvcache.integrations.transformers import HFCache, HFPrefixCache, HFStaticCache, install
from kvcache.integrations.transformers.kinds import Trait
from kvcache.stores import MemoryStore

PROMPT, NEW, CAPACITY, LOOKBACK = 13, 12, 96, 8
"""Windows of 7 forget within a prompt and the tokens after it, also with what they keep to go back."""
TOLERANCE = 2e-4
"""Of logits, relative to the largest of them: other layouts and lengths of sums round differently."""


@dataclass(frozen=True)
class Found:
    """Tokens and logits that one way of computing gives."""

    tokens: torch.Tensor
    logits: torch.Tensor

    def agrees(self, other: Found) -> bool:
        if self.tokens.shape != other.tokens.shape or not torch.equal(self.tokens, other.tokens):
            return False
        if self.logits.shape != other.logits.shape:
            return False
        largest = max(1.0, float(other.logits.nan_to_num(0, 0, 0).abs().max()))
        close = torch.isclose(self.logits, other.logits, rtol=0, atol=TOLERANCE * largest, equal_nan=True)
        return bool(close.all())


class Case:
    """One model, what it is given, and its caches."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model = small.build(name)
        self.config = self.model.config
        self.encoded = bool(self.config.is_encoder_decoder)
        self.cache_name = (
            "cache_params" if "mamba" in type(self.model).__name__.lower() else "past_key_values"
        )
        kind = self.model.generation_config
        kind.eos_token_id, kind.pad_token_id, kind.max_length, kind.use_cache = None, 0, None, True
        for unwanted in (
            "forced_eos_token_id",
            "forced_bos_token_id",
            "suppress_tokens",
            "begin_suppress_tokens",
        ):
            setattr(kind, unwanted, None)
        kind.decoder_start_token_id = 1 if self.encoded else None
        self.by_one = self.config.model_type in small.BY_ONE

    def assistant(self) -> Any:
        """Nearly the same model: some of its drafts are right, some are not."""
        other = copy.deepcopy(self.model)
        generator = torch.Generator().manual_seed(5)
        for parameter in other.parameters():
            if parameter.is_floating_point():
                parameter.mul_(1 + 0.05 * torch.randn(parameter.shape, generator=generator))
        return other

    def ours(self, **options: Any) -> Any:
        return HFCache(self.config, **{"capacity": CAPACITY, "lookback": LOOKBACK, **options})

    def theirs(self) -> Any:
        own = transformers.DynamicCache(config=self.config.get_text_config(decoder=True))
        if not self.encoded:
            return own
        cross = transformers.DynamicCache(config=self.config.get_text_config(decoder=True))
        return transformers.EncoderDecoderCache(own, cross)

    def encoder_input(self, rows: int) -> dict[str, torch.Tensor]:
        """What an encoder is given: text, or sound."""
        name, shape = small.SOUNDS.get(self.name, ("", ()))
        if not name:
            return {
                "input_ids": tokens(rows, 9, seed=3),
                "attention_mask": torch.ones(rows, 9, dtype=torch.long),
            }
        sound = torch.randn(rows, *shape, generator=torch.Generator().manual_seed(rows))
        return {name: sound}

    @functools.cache  # noqa: B019 - one case at a time
    def encoder_outputs(self, rows: int) -> Any:
        with torch.no_grad():
            return self.model.get_encoder()(**self.encoder_input(rows))

    def batch(self, rows: int, padded: bool = False, seed: int = 0) -> dict[str, torch.Tensor]:
        """What generate() is given; row i is padded by 5 - 2 * i tokens on the left.

        A decoder that an encoder stands beside is given a prompt too.
        """
        ids = tokens(rows, PROMPT, seed)
        mask = torch.ones_like(ids)
        for row in range(rows if padded else 0):
            ids[row, : max(0, 5 - 2 * row)] = mask[row, : max(0, 5 - 2 * row)] = 0
        if not self.encoded:
            return {"input_ids": ids, "attention_mask": mask} | small.image(self.name, rows, PROMPT, seed)
        decoder = {"decoder_input_ids": ids}
        return self.encoder_input(rows) | decoder | ({"decoder_attention_mask": mask} if padded else {})

    def generate(self, batch: dict[str, torch.Tensor], cache: Any = None, **options: Any) -> Found:
        given = {} if cache is None else {self.cache_name: cache}
        torch.manual_seed(7)
        settings = {"max_new_tokens": NEW, "do_sample": False, "output_logits": True,
                    "return_dict_in_generate": True}  # fmt: skip
        found = self.model.generate(**copy.deepcopy(batch), **settings, **given, **options)
        return Found(found.sequences, torch.stack(found.logits))

    def feed(self, cache: Any, ids: torch.Tensor) -> torch.Tensor:
        """Logits (rows, tokens, vocabulary) of new tokens; without a cache where it is None."""
        if self.by_one and ids.shape[1] > 1 and cache is not None and _holds(cache):
            return torch.cat([self.feed(cache, ids[:, i : i + 1]) for i in range(ids.shape[1])], 1)
        given: dict[str, Any] = {"use_cache": cache is not None}
        if cache is not None:
            given[self.cache_name] = cache
        if self.encoded:
            # a model may write into it
            given["encoder_outputs"] = copy.deepcopy(self.encoder_outputs(len(ids)))
            given["decoder_input_ids"] = ids
        else:
            given["input_ids"] = ids
            if "position_ids" in inspect.signature(self.model.forward).parameters:
                begin = 0 if cache is None else cache.get_seq_length()
                given["position_ids"] = torch.arange(begin, begin + ids.shape[1]).expand(len(ids), -1)
        with torch.no_grad():
            logits: torch.Tensor = self.model(**given).logits
        return logits


def _holds(cache: Any) -> bool:
    """Whether a cache has seen tokens; one of states alone does not count them."""
    try:
        return bool(cache.get_seq_length())
    except ValueError:
        return bool(cache.has_previous_state())


def tokens(rows: int, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 97, (rows, count), generator=torch.Generator().manual_seed(31 * rows + seed))


Run = Callable[[Case, str], Found]
"""One mode of one case; "none", "theirs" or "ours" is the cache."""


@functools.cache
def _plain(case: Case, rows: int, padded: bool = False, beams: int = 1) -> Found:
    """generate() without a cache."""
    return case.generate(case.batch(rows, padded), use_cache=False, num_beams=beams)


def _generating(rows: int, padded: bool = False, **options: Any) -> Run:
    def run(case: Case, which: str) -> Found:
        if which == "none":
            return _plain(case, rows, padded, options.get("num_beams", 1))
        own = {key: value(case) if callable(value) else value for key, value in options.items()}
        batch = case.batch(rows, padded)
        if which == "theirs":
            return case.generate(batch, **own)
        cache = case.ours()
        found = case.generate(batch, cache, **own)
        if not cache.rows.length:
            raise UnusedError("the model puts nothing into the cache")
        return found

    return run


def _static(case: Case, which: str) -> Found:
    if which == "none":
        return _plain(case, 2, True)
    batch = case.batch(2, True)
    if which == "theirs":
        options = {"cache_implementation": "static", "max_cache_len": CAPACITY}
        return case.generate(batch, disable_compile=True, **options)
    return case.generate(batch, HFStaticCache(case.config, capacity=CAPACITY), disable_compile=True)


def _install(case: Case, which: str) -> Found:
    if which == "none":
        return _plain(case, 2, True)
    with install(lookback=LOOKBACK) if which == "ours" else contextlib.nullcontext():
        return case.generate(case.batch(2, True))


@functools.cache
def _whole(case: Case) -> torch.Tensor:
    return case.feed(None, torch.cat((tokens(2, 10), tokens(2, 7, seed=9)), 1))


def _onward(change: Callable[[Case, Any, torch.Tensor], Any], **options: Any) -> Run:
    """10 tokens, what ``change`` does to the cache, then 7 others: one, four, two."""

    def run(case: Case, which: str) -> Found:
        first, then = tokens(2, 10), tokens(2, 7, seed=9)
        if which == "none":
            return Found(then, _whole(case)[:, -7:])
        cache = case.ours(**options) if which == "ours" else case.theirs()
        case.feed(cache, first)
        cache = change(case, cache, first)
        parts = [case.feed(cache, then[:, begin:end]) for begin, end in ((0, 1), (1, 5), (5, 7))]
        return Found(then, torch.cat(parts, 1))

    return run


def _crop(case: Case, cache: Any, first: torch.Tensor) -> Any:
    cache.activate_past_recording()
    case.feed(cache, tokens(2, 3, seed=4))
    cache.crop(-3)
    return cache


def _fork(case: Case, cache: Any, first: torch.Tensor) -> Any:
    """A fork, after which the original goes its own way; transformers' caches are copied instead."""
    return _parted(case, cache, cache.fork() if isinstance(cache, HFCache) else copy.deepcopy(cache))


def _copy(case: Case, cache: Any, first: torch.Tensor) -> Any:
    return _parted(case, cache, copy.deepcopy(cache))


def _parted(case: Case, cache: Any, other: Any) -> Any:
    case.feed(cache, tokens(2, 5, seed=4))
    return other


def _save(case: Case, cache: Any, first: torch.Tensor) -> Any:
    if not isinstance(cache, HFCache):
        return copy.deepcopy(cache)
    store, other = MemoryStore(), case.ours()
    assert cache.save(store, "key")
    assert other.load(store, "key")
    return other


class UnusedError(Exception):
    """A cache was given to a model, and has nothing in it."""


class InterruptedPassError(Exception):
    """What the hook in the middle of a pass raises."""


def _interrupt(case: Case, cache: Any, first: torch.Tensor) -> Any:
    """A pass fails before its last layer; what our error then advises is done."""
    if not isinstance(cache, HFCache):
        return cache
    growing = [i for i, kind in enumerate(cache.rows.pool.plan.layers) if kind.grows]
    with _failing(case.model, growing[-1]), contextlib.suppress(InterruptedPassError):
        case.feed(cache, tokens(2, 3, seed=4))
    try:
        case.feed(cache, tokens(2, 1, seed=4))
    except ml.MLError as error:
        advice = re.search(r"[Cc]all (crop|reset)\((-?\d*)\)", str(error))
        if advice is None:
            raise
        getattr(cache, advice[1])(*([int(advice[2])] if advice[2] else []))
    if Trait.INSIDE in cache.rows.pool.plan.traits:  # no cache knows of it: the docs say what to do
        cache.reset()
    held = cache.get_seq_length()
    if held < first.shape[1]:
        case.feed(cache, first[:, held:])
    return cache


@contextlib.contextmanager
def _failing(model: Any, last: int) -> Iterator[None]:
    """What uses layer ``last`` of the cache raises; in a model that goes through its modules again and again,
    the last of them."""
    names = ("layer_idx", "layer_id")
    found = [(getattr(m, name, None), m) for m in model.modules() for name in names]
    found = [(index, module) for index, module in found if index is not None]

    def fail(*_: Any) -> None:
        raise InterruptedPassError

    last = min(last, max(index for index, _ in found))
    hooks = [module.register_forward_pre_hook(fail) for index, module in found if index == last]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _prefix(case: Case, which: str, **drafting: Any) -> Found:
    """Two turns and a branch that share prefixes; what they generate."""
    turns, ids = [], tokens(1, 20)
    lead = HFPrefixCache(case.model, capacity=200, lookback=LOOKBACK, interval=8) if which == "ours" else None
    with lead or contextlib.nullcontext():
        for seed in range(3):
            options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
            if which == "ours":
                assert lead is not None
                out = lead.generate(ids, **options, **drafting)
            else:
                mask = torch.ones_like(ids)
                options |= drafting if which == "theirs" else {"use_cache": False}
                out = case.model.generate(ids, attention_mask=mask, **options)
            turns.append(out)
            ids = torch.cat((out[:, : 26 if seed == 0 else 22], tokens(1, 5, seed=seed)), 1)
    return Found(torch.cat(turns, 1), torch.zeros(1))


MODES: dict[str, Run] = {
    "single": _generating(1),
    "batch": _generating(3, True),
    "chunked": _generating(2, True, prefill_chunk_size=4),
    "lookup": _generating(1, prompt_lookup_num_tokens=4, max_matching_ngram_size=1),
    "assisted": _generating(1, assistant_model=Case.assistant),
    "beams": _generating(2, num_beams=3),
    "crop": _onward(_crop),
    "fork": _onward(_fork, max_sequences=4),
    "copy": _onward(_copy),
    "save": _onward(_save),
    "interrupt": _onward(_interrupt),
    "static": _static,
    "install": _install,
    "prefix": _prefix,
    "prefix, lookup": functools.partial(_prefix, prompt_lookup_num_tokens=4, max_matching_ngram_size=1),
}


SHORT = {
    "=": "=",
    "theirs": "~",
    "right": "+",
    "refused": "r",
    "cannot": "t",
    "wrong": "wrong",
}
"""How a verdict is shown."""


def judge(case: Case, mode: str) -> tuple[str, str]:
    """What became of one mode, and what was said.

    "=": as with transformers' own cache and as without any; "theirs": as with its own, which differs from a
    run without one; "right": as without any, where its own fails or differs; "refused": by us; "cannot": it
    fails with its own cache as it does with ours; "wrong" is the rest.
    """
    found: list[Any] = []
    for which in ("none", "theirs", "ours"):
        try:
            found.append(MODES[mode](case, which))
        except Exception as error:
            error.__traceback__ = None
            found.append(error)
    none, theirs, ours = found
    if isinstance(ours, Exception):
        if isinstance(ours, ml.NotSupportedError) or (
            isinstance(ours, ml.MLError) and not isinstance(theirs, Exception)
        ):
            return "refused", _told(ours)
        return "cannot" if isinstance(theirs, Exception) else "wrong", _told(ours)
    if not isinstance(theirs, Exception) and ours.agrees(theirs):
        return ("=", "") if isinstance(none, Exception) or ours.agrees(none) else ("theirs", "")
    if not isinstance(none, Exception) and ours.agrees(none):
        return "right", _told(theirs) if isinstance(theirs, Exception) else ""
    return "wrong", _told(theirs) if isinstance(theirs, Exception) else ""


def _told(error: Exception) -> str:
    text = re.sub(r"\( \(.*\) \)", "", " ".join(str(error).split()))  # without what a model consists of
    return f"{type(error).__name__}: {text[:300]}"


def examine(label: str, modes: Sequence[str] = tuple(MODES)) -> dict[str, Any]:
    """The verdicts on a type: {"modes": {mode: (kind, told)}}, or {"built": why it is not}."""
    if label in small.CANNOT:
        return {"built": small.CANNOT[label]}
    try:
        case = Case(label)
    except Exception as error:
        return {"built": _told(error)}
    found = {mode: judge(case, mode) for mode in modes}
    _plain.cache_clear()
    _whole.cache_clear()
    Case.encoder_outputs.cache_clear()
    return {"modes": found}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.census transformers", description=__doc__)
    parser.add_argument("--type", action="append", default=[], help="only this type; repeatable")
    parser.add_argument("--results", type=Path, help="a JSON file that keeps what was found")
    parser.add_argument("--render", action="store_true", help="write the table into the docs")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    warnings.simplefilter("ignore")
    logging.getLogger("kvcache.transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    results = {}
    if options.results is not None and options.results.exists():
        results = json.loads(options.results.read_text(encoding="utf-8"))
    for label in options.type or [label for label in small.types() if label not in results]:
        results[label] = found = examine(label)
        cells = {mode: SHORT[kind] for mode, (kind, _) in found.get("modes", {}).items()}
        print(
            f"{label}: " + (found.get("built") or " ".join(f"{mode} {cell}" for mode, cell in cells.items()))
        )
        said: dict[str, list[str]] = {}
        for mode, (_, told) in found.get("modes", {}).items():
            said.setdefault(told, []).append(mode)
        for told in filter(None, said):
            print(f"    {', '.join(said[told])}: {told[:200]}")
        if options.results is not None:
            options.results.write_text(json.dumps(results, indent=1), encoding="utf-8")
    if options.render:
        render(results)
    return 0


DOCS = Path(__file__).resolve().parents[2] / "docs" / "embedding-transformers.md"
MARKS = "<!-- census -->", "<!-- /census -->"


def render(results: Mapping[str, Any]) -> None:
    """Write the table between the marks in the docs: a row for all types of which the same became."""
    notes: dict[str, int] = {}
    rows: dict[tuple[str, ...], list[str]] = {}
    for label, found in results.items():
        if "modes" in found:
            cells = tuple(_cell(label, *found["modes"][mode], notes) for mode in MODES)
            rows.setdefault(cells, []).append(label)
    lines = ["| types | " + " | ".join(MODES) + " |", "|---" * (len(MODES) + 1) + "|"]
    for cells, labels in sorted(rows.items(), key=lambda row: -len(row[1])):
        lines.append(f"| {len(labels)}: {', '.join(labels)} | " + " | ".join(cells) + " |")
    lines += ["", *(f"{number}. {note}" for note, number in notes.items())]
    unbuilt = [f"{label} ({found['built']})" for label, found in results.items() if "built" in found]
    lines += ["", f"Not built: {'; '.join(unbuilt)}."]
    text = DOCS.read_text(encoding="utf-8")
    before, after = text.split(MARKS[0])[0], text.split(MARKS[1])[1]
    DOCS.write_text(f"{before}{MARKS[0]}\n" + "\n".join(lines) + f"\n{MARKS[1]}{after}", encoding="utf-8")


def _cell(label: str, kind: str, told: str, notes: dict[str, int]) -> str:
    """A verdict, with the number of the note that says why it is so."""
    if kind not in ("refused", "cannot", "wrong"):
        return SHORT[kind]
    note = re.sub(rf"\b{re.escape(label.split()[0])}\b", "a type", told)
    note = re.sub(r"such as \w+|\bsize of tensor .*|\b\w+For\w+|\[\d+\]", "...", note)
    note = re.sub(r"layer \d+ of [\w ]+ is", "a layer of a type is", note)
    note = re.sub(r"\b\w+Decoder\b", "a decoder", note)
    return f"{SHORT[kind]}{notes.setdefault(note, len(notes) + 1)}"
