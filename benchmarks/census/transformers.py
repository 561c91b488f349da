"""transformers' models in the modes of HFCache, HFStaticCache, HFPrefixCache and ``install``."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.generation.utils import ALL_CACHE_NAMES
from transformers.models.minimax.modeling_minimax import MiniMaxCache

import ml
from benchmarks.census import transformers_types as small
from kvcache import PrefixOptions
from kvcache.integrations.transformers import HFCache, HFPrefixCache, HFStaticCache, install
from kvcache.integrations.transformers.kinds import Trait, grows, layer_plan
from kvcache.stores import MemoryStore

CANNOT, types = small.CANNOT, small.types
PROMPT, NEW, CAPACITY, LOOKBACK = 13, 12, 96, 8
"""Windows of 7 forget within a prompt and the tokens after it, also with what they keep to go back."""
TOLERANCE = 2e-4
"""Of logits, relative to the largest of them: other layouts and lengths of sums round differently."""


def quiet() -> None:
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    warnings.simplefilter("ignore")
    logging.getLogger("kvcache.transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Found:
    """Tokens and logits that one way of computing gives."""

    tokens: torch.Tensor
    logits: torch.Tensor

    def agrees(self, other: Found) -> bool:
        if not torch.equal(self.tokens, other.tokens) or self.logits.shape != other.logits.shape:
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
        mamba = "mamba" in type(self.model).__name__.lower()
        self.cache_name = "cache_params" if mamba else "past_key_values"
        if ALL_CACHE_NAMES[0] == "cache":  # from transformers 5.24 on
            self.cache_name = "cache"
        self.by_one = self.config.model_type in small.BY_ONE
        kind = self.model.generation_config
        for unwanted in (
            "eos_token_id", "max_length", "forced_eos_token_id", "forced_bos_token_id", "suppress_tokens",
            "begin_suppress_tokens",
        ):  # fmt: skip
            setattr(kind, unwanted, None)
        kind.pad_token_id, kind.use_cache = 0, True
        kind.decoder_start_token_id = 1 if self.encoded else None

    def assistant(self) -> Any:
        """Nearly the same model: some of its drafts are right, some are not."""
        other = copy.deepcopy(self.model)
        generator = torch.Generator().manual_seed(5)
        for parameter in other.parameters():
            if parameter.is_floating_point():
                parameter.mul_(1 + 0.05 * torch.randn(parameter.shape, generator=generator))
        return other

    @functools.cached_property
    def attending(self) -> Any:
        """The same model, which attends by our caches."""
        other = copy.deepcopy(self.model)
        other.set_attn_implementation("kvcache")
        return other

    def ours(self, model: Any = None, **options: Any) -> Any:
        config = (model or self.model).config
        return HFCache(config, **{"capacity": CAPACITY, "lookback": LOOKBACK, **options})

    def theirs(self) -> Any:
        if self.config.model_type == "minimax":
            return MiniMaxCache()
        own, cross = (
            transformers.DynamicCache(config=self.config.get_text_config(decoder=True)) for _ in range(2)
        )
        return transformers.EncoderDecoderCache(own, cross) if self.encoded else own

    def fixed(self) -> Any:
        """transformers' own cache of fixed shapes."""
        own = transformers.StaticCache(self.config.get_text_config(decoder=True), max_cache_len=CAPACITY)
        return transformers.EncoderDecoderCache(own, transformers.DynamicCache()) if self.encoded else own

    def encoder_input(self, rows: int) -> dict[str, torch.Tensor]:
        """What an encoder is given: text, or sound."""
        name, shape = small.SOUNDS.get(self.name, ("", ()))
        if name:
            return {name: torch.randn(rows, *shape, generator=torch.Generator().manual_seed(rows))}
        ids = tokens(rows, 9, seed=3)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    @functools.cache  # noqa: B019 - as long as the case
    def encoder_outputs(self, rows: int) -> Any:
        with torch.no_grad():
            return self.model.get_encoder()(**self.encoder_input(rows))

    def batch(self, rows: int, padded: bool = False, seed: int = 0) -> dict[str, torch.Tensor]:
        """What generate() is given, a decoder beside an encoder too; row i is padded by 5 - 2 * i tokens."""
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

    @functools.cache  # noqa: B019
    def plain(self, rows: int, padded: bool = False, beams: int = 1) -> Found:
        """generate() without a cache."""
        return self.generate(self.batch(rows, padded), use_cache=False, num_beams=beams)

    @functools.cache  # noqa: B019
    def whole(self) -> torch.Tensor:
        """The logits of a text in one pass."""
        return self.feed(None, torch.cat((tokens(2, 10), tokens(2, 7, seed=9)), 1))

    def feed(
        self, cache: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, model: Any = None, row: int = 0
    ) -> torch.Tensor:
        """Logits (rows, tokens, vocabulary) of new tokens; without a cache where it is None.

        ``mask`` (rows, tokens so far) says what is no padding, ``row`` which of two one row is.
        """
        model, count = model or self.model, ids.shape[1]
        if self.by_one and count > 1 and cache is not None and _holds(cache):
            parts = []
            for i in range(count):
                upto = None if mask is None else mask[:, : mask.shape[1] - count + i + 1]
                parts.append(self.feed(cache, ids[:, i : i + 1], upto, model))
            return torch.cat(parts, 1)
        given: dict[str, Any] = {"use_cache": cache is not None}
        if cache is not None:
            given[self.cache_name] = cache
        if self.encoded:  # a model may write into what its encoder gives
            given["encoder_outputs"] = copy.deepcopy(self.encoder_outputs(2))
            for name, found in given["encoder_outputs"].items() if len(ids) == 1 else ():
                given["encoder_outputs"][name] = found[row : row + 1]
            given["decoder_input_ids"] = ids
        else:
            given["input_ids"] = ids
        positions = "decoder_position_ids" if self.encoded else "position_ids"
        if positions in inspect.signature(model.forward).parameters:
            begin = 0 if cache is None else cache.get_seq_length()
            given[positions] = torch.arange(begin, begin + count).expand(len(ids), -1)
            if mask is not None:
                given[positions] = (mask.cumsum(1) - 1).clamp(min=0)[:, -count:]
        if mask is not None:
            given["decoder_attention_mask" if self.encoded else "attention_mask"] = mask
        with torch.no_grad():
            logits: torch.Tensor = model(**given).logits
        return logits

    def ragged(self, later: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Two rows, and what of them is no padding: three tokens on the left, and two ``later``."""
        ids, mask = tokens(2, 17), torch.ones(2, 17, dtype=torch.long)
        mask[0, :3] = 0
        mask[1, 12:14] = int(not later)
        return ids * mask, mask

    @functools.cache  # noqa: B019
    def alone(self, later: bool) -> Found:
        """The logits of each row of ``ragged`` alone, without its padding."""
        ids, mask = self.ragged(later)
        rows = [self.feed(None, ids[i : i + 1, mask[i] > 0], row=i)[0] for i in range(2)]
        return Found(ids, torch.cat(rows))


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


agree = Found.agrees


def is_right(case: Case, mode: str, found: Found) -> bool | None:
    try:
        return found.agrees(MODES[mode](case, "none"))
    except Exception:
        return None


def _generating(rows: int, padded: bool = False, **options: Any) -> Run:
    def run(case: Case, which: str) -> Found:
        if which == "none":
            return case.plain(rows, padded, options.get("num_beams", 1))
        own = {key: value(case) if callable(value) else value for key, value in options.items()}
        cache = case.ours() if which == "ours" else None
        found = case.generate(case.batch(rows, padded), cache, **own)
        if cache is not None and not cache.rows.length:
            raise ValueError("the model puts nothing into the cache")
        return found

    return run


def _static(case: Case, which: str) -> Found:
    if which == "none":
        return case.plain(2, True)
    options: dict[str, Any] = {"cache_implementation": "static", "max_cache_len": CAPACITY}
    if which == "ours":
        options = {"cache": HFStaticCache(case.config, capacity=CAPACITY)}
    return case.generate(case.batch(2, True), disable_compile=True, **options)


def _install(case: Case, which: str) -> Found:
    if which == "none":
        return case.plain(2, True)
    with install(lookback=LOOKBACK) if which == "ours" else contextlib.nullcontext():
        return case.generate(case.batch(2, True))


def _onward(change: Callable[[Case, Any, torch.Tensor], Any], **options: Any) -> Run:
    """10 tokens, what ``change`` does to the cache, then 7 others: one, four, two."""

    def run(case: Case, which: str) -> Found:
        first, then = tokens(2, 10), tokens(2, 7, seed=9)
        if which == "none":
            return Found(then, case.whole()[:, -7:])
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
    other = cache.fork() if isinstance(cache, HFCache) else copy.deepcopy(cache)
    case.feed(cache, tokens(2, 5, seed=4))
    return other


def _copy(case: Case, cache: Any, first: torch.Tensor) -> Any:
    other = copy.deepcopy(cache)
    case.feed(cache, tokens(2, 5, seed=4))
    return other


def _save(case: Case, cache: Any, first: torch.Tensor) -> Any:
    if not isinstance(cache, HFCache):
        return copy.deepcopy(cache)
    store, other = MemoryStore(), case.ours()
    assert cache.save(store, "key")
    assert other.load(store, "key")
    return other


def _ragged(make: Callable[..., Any] | None, later: bool | None, attends: bool) -> Run:
    """A padded prompt, then one token, four, two. ``later``: padding in these too; None: without states.

    With ``make`` None all at once and without a cache; "theirs" has an attention of the model's own, and no
    cache either where transformers' own is wrong behind padding.
    """

    def run(case: Case, which: str) -> Found:
        padded = later if later is not None else not _has_states(case)
        if which == "none":
            return case.alone(padded)
        model = case.attending if attends and which == "ours" else case.model
        (ids, mask), ours = case.ragged(padded), which == "ours" and make is Case.ours
        lost = which == "theirs" and make is Case.ours and case.name in small.LOST_BEHIND_PADDING
        whole, cache = make is None or lost, None
        if make is not None and not lost:
            cache = case.ours(model) if ours else case.theirs() if make is Case.ours else make(case)
        ends = (0, 17) if whole else (0, 10, 11, 15, 17)
        logits = [
            case.feed(cache, ids[:, begin:end], mask[:, :end], model)
            for begin, end in itertools.pairwise(ends)
        ]
        return Found(ids, torch.cat(logits, 1)[mask > 0])

    return run


def _has_states(case: Case) -> bool:
    with contextlib.suppress(ml.NotSupportedError):
        return layer_plan(case.config).is_hybrid
    return False


class InterruptedPassError(Exception):
    """What the hook in the middle of a pass raises."""


def _interrupt(case: Case, cache: Any, first: torch.Tensor) -> Any:
    """A pass fails before its last layer; what our error then advises is done."""
    if not isinstance(cache, HFCache):
        return cache
    growing = [i for i, kind in enumerate(cache.rows.pool.plan.layers) if grows(kind)]
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
    """What uses layer ``last`` of the cache raises, or the last of modules that are gone through again."""
    found = [(getattr(m, name, None), m) for m in model.modules() for name in ("layer_idx", "layer_id")]
    indices = [index for index, _ in found if index is not None]

    def fail(*_: Any) -> None:
        raise InterruptedPassError

    last = min(last, max(indices))
    hooks = [module.register_forward_pre_hook(fail) for index, module in found if index == last]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _prefix(case: Case, which: str, **drafting: Any) -> Found:
    """Two turns and a branch that share prefixes; what they generate."""
    turns, ids = [], tokens(1, 20)
    every = PrefixOptions(interval=8)
    lead = (
        HFPrefixCache(case.model, capacity=200, lookback=LOOKBACK, options=every) if which == "ours" else None
    )
    with lead or contextlib.nullcontext():
        for seed in range(3):
            options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
            if lead is not None:
                out = lead.generate(ids, **options, **drafting)
            else:
                mask = torch.ones_like(ids)
                options |= drafting if which == "theirs" else {"use_cache": False}
                out = case.model.generate(ids, attention_mask=mask, **options)
            turns.append(out)
            ids = torch.cat((out[:, : 26 if seed == 0 else 22], tokens(1, 5, seed=seed)), 1)
    return Found(torch.cat(turns, 1), torch.zeros(1))


_DRAFTS: dict[str, Any] = {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 1}
MODES: dict[str, Run] = {
    "single": _generating(1),
    "batch": _generating(3, True),
    "chunked": _generating(2, True, prefill_chunk_size=4),
    "lookup": _generating(1, **_DRAFTS),
    "assisted": _generating(1, assistant_model=Case.assistant),
    "beams": _generating(2, num_beams=3),
    "crop": _onward(_crop),
    "fork": _onward(_fork, max_sequences=4),
    "copy": _onward(_copy),
    "save": _onward(_save),
    "interrupt": _onward(_interrupt),
    "static": _static,
    "install": _install,
    "padding": _ragged(Case.ours, True, attends=False),
    "kvcache": _ragged(Case.ours, None, attends=True),
    "kvcache, dynamic": _ragged(Case.theirs, None, attends=True),
    "kvcache, static": _ragged(Case.fixed, None, attends=True),
    "kvcache, none": _ragged(None, None, attends=True),
    "prefix": _prefix,
    "prefix, lookup": functools.partial(_prefix, **_DRAFTS),
}
