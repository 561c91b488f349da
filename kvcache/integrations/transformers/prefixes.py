"""Conversations with a transformers model that never recompute a shared prefix."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kvcache import (
    HostTier,
    InvalidRangeError,
    KVCacheError,
    NotSupportedError,
    PrefixCache,
    Session,
    Snapshot,
    Turns,
    in_turn,
    layers_of_cache,
)
from kvcache.integrations.conversations import (
    MOST_DRAFTS,
    Conversation,
    LayerShapes,
    SharedPrefixes,
    invariant_config,
    prefix_options,
)
from kvcache.integrations.transformers.adapters import Adapters
from kvcache.integrations.transformers.arguments import THEIRS, ArgumentError, check_model, check_type
from kvcache.integrations.transformers.cache import HFCache, cache_argument, generating
from kvcache.integrations.transformers.kinds import Trait, layer_plan
from kvcache.integrations.transformers.places import device_of, layer_devices
from kvcache.integrations.transformers.rope import check_rotation, rotation_limit
from kvcache.stores import Part

__all__ = ["HFPrefixCache", "HFSession"]


class HFSession(Conversation):
    """One conversation: ``cache`` is its HFCache, and contains ``cached`` of the prompt's tokens. In your own
    loop, pass the model ``remaining``, the tokens that the cache lacks, each once; report sampled tokens with
    ``extend``. (transformers' ``generate`` takes all tokens and skips the cached ones.) If the evaluated
    tokens differ from the reported ones, this cannot be detected, and later conversations start from wrong
    keys and values. Calls of the session wait for those of other threads. Passes of your own loop do not, and
    a thread whose pass was ended by another one gets OrderError: hold ``HFPrefixCache.lock`` if several
    threads have such loops.
    """

    def __init__(self, owner: HFPrefixCache, session: Session, variant: Part = None) -> None:
        """``variant`` identifies the adapters and weights that compute it."""
        self._owner, self._variant = owner, variant
        self.cache = type(owner.cache).of(owner.cache.rows.adopt(session.seq, session.cached))
        super().__init__(session, self.cache.rows, self.cache.get_seq_length)
        self.cache.rows.limit = owner.limit
        session.complete = self.cache.rows.complete
        self.cache.rows.session_snapshots = self._snapshots

    @in_turn
    def _snapshots(self, inside: int | None) -> Sequence[Snapshot]:
        return self._session.snapshots(inside)

    @in_turn
    def prefill(self, size: int = 512) -> None:
        """Evaluate ``remaining`` except its last token, at most ``size`` tokens at a time. ``generate``
        continues from there. Snapshots are taken at the ends of parts where they are due. A pass that raises
        leaves no trace: ``remaining`` still has its tokens.
        """
        tokens, owner = self._session.tokens, self._owner
        owner.forget_images()
        ids = torch.tensor([tokens[:-1]], device=device_of(owner.model))
        options = {**_one_token(owner.model), **owner.named(self.cache)}
        for begin, end in self._parts(min(size, owner.longest_pass)):
            step = 1 if begin and owner.by_one else end - begin
            for upto in range(begin + step, end + 1, step):
                # The model prepares its other inputs, for example positions that begin at 2.
                part = ids[:, :upto]
                try:
                    owner.model.generate(part, attention_mask=torch.ones_like(part), **options)
                except BaseException:
                    with contextlib.suppress(KVCacheError):
                        self._session.undo(self.cache.rows.undo_failed)
                    raise

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            if not self._owner.adapters.are(self._variant):  # the tokens may mix both variants
                self._session.close(keep=False)
            yield
        finally:
            self.cache.detach()


def _one_token(model: Any) -> dict[str, Any]:
    """Options of ``generate`` for one token, overriding the model's own generation config."""
    config = model.generation_config
    own = [name for name in config.to_diff_dict() if name in vars(config) and not name.startswith("_")]
    asked = {name: None for name in own if not name.endswith("_token_id")}
    plain = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "use_cache": True}
    return {**asked, **plain, "max_new_tokens": 1}


_patching = threading.Lock()
_patched: dict[int, tuple[list[HFCache], Any]] = {}
"""By the id of a generating model, the caches of its conversations, and the replaced attribute."""


@contextlib.contextmanager
def _given_the_rest(model: Any, cache: HFCache) -> Iterator[None]:
    """Pass the model only tokens that the cache lacks; assisted decoding begins with all tokens. Calls of
    ``generate`` with another cache, from other threads or a streamer, are not affected.
    """
    name, model = "prepare_inputs_for_generation", generating(model)
    with _patching:
        caches, own = _patched.setdefault(id(model), ([], vars(model).get(name)))
        if not caches:
            setattr(model, name, _preparing(getattr(model, name), caches))
        caches.append(cache)
    try:
        yield
    finally:
        with _patching:
            caches[:] = [other for other in caches if other is not cache]
            if not caches:
                del _patched[id(model)]
                delattr(model, name) if own is None else setattr(model, name, own)


def _preparing(prepare: Any, caches: list[HFCache]) -> Any:
    @functools.wraps(prepare)  # generate() inspects its parameters
    def prepare_rest(
        input_ids: torch.Tensor, next_sequence_length: int | None = None, **options: Any
    ) -> dict[str, Any]:
        ours = [value for value in options.values() if any(value is cache for cache in caches)]
        lacking = input_ids.shape[1] - ours[0].get_seq_length() if ours else 0
        if next_sequence_length is None and lacking > 0:  # chunks of a prefill exclude cached tokens
            next_sequence_length = lacking
        prepared: dict[str, Any] = prepare(input_ids, next_sequence_length=next_sequence_length, **options)
        if ours:  # any number of drafts may follow the prompt
            ours[0].rows.drafts = max(0, input_ids.shape[1] - ours[0].rows.prompt)
        return prepared

    return prepare_rest


def _check_one_row(input_ids: object, options: dict[str, Any]) -> None:
    """Refuse anything but one conversation, and remove its mask of ones from the options."""
    wanted = "a tensor (1, tokens), such as tokenizer(text, return_tensors='pt').input_ids"
    check_type("generate", "input_ids", input_ids, wanted, isinstance(input_ids, torch.Tensor))
    assert isinstance(input_ids, torch.Tensor)
    shape = tuple(input_ids.shape)
    if len(shape) != 2 or shape[0] != 1:
        raise InvalidRangeError(f"generate: input_ids {shape}; their shape must be (1, tokens)")
    mask = options.pop("attention_mask", None)
    if mask is not None and (tuple(mask.shape) != shape or not bool(mask.all())):
        raise InvalidRangeError("generate: attention_mask hides tokens; a conversation must have no padding")
    if options.get("cache_implementation", "") is None:  # None is passed below
        del options["cache_implementation"]
    for name in ("cache", "past_key_values", "cache_params", "cache_implementation"):
        if name in options:
            raise ArgumentError(f"generate: {name} is given; the HFPrefixCache passes its own cache")


_DRAFTS = "drafts from hidden states of the whole prompt, but only its last token is computed"
_REFUSED = {
    "token_healing": "replaces the last tokens of the prompt, which identify prefixes",
    "use_mtp": _DRAFTS,
    "speculation_type": _DRAFTS,
}
"""Options that a conversation does not support, and the reason."""
_EMBEDDED = ("codegen", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "imagegpt", "paligemma")
"""Model types whose results for ``token_type_ids`` of zeros differ from those without."""


def _asked(model: Any, options: dict[str, Any], name: str) -> Any:
    """The value of an option of ``generate``: passed, from the passed config, or from the model's own."""
    if name in options:
        return options[name]
    configs = [options.get("generation_config"), model.generation_config]
    values = [getattr(config, name, None) for config in configs]
    return next((value for value in values if value is not None), None)


def _check_inputs(model: Any, options: dict[str, Any]) -> None:
    """Refuse several rows, and inputs besides or in place of tokens, since tokens identify prefixes. Token
    types without effect are removed from the options. A config's ``cache_implementation`` is ignored, since
    the conversation's cache is passed.
    """
    if options.get("adapter_names") is not None:
        raise NotSupportedError(
            "generate: adapter_names is given, and prefixes are kept for the adapters that are active; call "
            "model.set_adapter"
        )
    for name in ("num_beams", "num_return_sequences"):
        value = _asked(model, options, name)
        if value != 1 and (value is not None or name in options):
            raise NotSupportedError(
                f"generate: {name}={value}; a conversation is one row: pass {name}=1, or call model.generate"
            )
    for name, why in _REFUSED.items():
        value = _asked(model, options, name)
        if value and (name != "speculation_type" or options.get("assistant_model") is not None):
            raise NotSupportedError(
                f"generate: {name}={value!r} {why}; pass {name}=None, or call model.generate with a new "
                "HFCache"
            )
    configs = [options.get("generation_config"), model.generation_config]
    if any(getattr(config, "cache_implementation", None) for config in configs):
        options["cache_implementation"] = None
    for name in ("token_type_ids", "mm_token_type_ids"):  # from a tokenizer: all of one text
        passed = options.get(name)
        embedded = name == "token_type_ids" and model.config.model_type in _EMBEDDED
        if isinstance(passed, torch.Tensor) and not bool(passed.any()) and not embedded:
            del options[name]
    known = inspect.signature(generating(model).generate).parameters
    for name, value in options.items():
        parts = value if isinstance(value, list | tuple) else [value]
        if name not in known and any(isinstance(part, torch.Tensor) for part in parts):
            raise NotSupportedError(
                f"generate: {name} is given besides the tokens, but only tokens identify prefixes; call "
                "model.generate with an HFCache for such inputs"
            )


_CACHE_OPTIONS = ("backend", "dtype", "lookback")
"""The fields of CacheOptions that an HFPrefixCache takes by the same name."""


class HFPrefixCache(SharedPrefixes):
    """A ``kvcache.PrefixCache`` for a decoder of transformers, sliding and hybrid ones included.

    Every conversation is a batch of one row, without padding; up to ``max_sequences`` may be open. They share
    ``max_sequences * capacity`` cells with kept conversations.

    Any thread may call it and its sessions; one call runs at a time, the others wait. ``generate`` holds
    ``lock`` from its first check to its last token, even while a slow ``streamer`` processes one.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_sequences: int = 4,
        capacity: int = 4096,
        batch_invariant: bool = False,
        **options: Any,
    ) -> None:
        """``max_sequences`` conversations of ``capacity`` tokens.

        ``batch_invariant``: answers do not depend on the cache's content, bit for bit; prompts are evaluated
        in blocks of ``block_size`` tokens, and only such blocks are reused, not answers. ``options`` are
        ``backend``, ``dtype`` and ``lookback``, as in ``CacheOptions``, and PrefixCache's: ``budget``,
        ``tiers``, ``identity``, ``block_size``, and its options. A thread writes each conversation to the
        stores when it ends, unless ``PrefixOptions(write_through=False)``. With a store among the ``tiers``,
        and without ``PrefixOptions(layers=...)``, the constructor calls the model once, with one token, to
        find its layers; stored entries with other layers are not used.
        """
        check_model("HFPrefixCache", model)
        if model.config.is_encoder_decoder:
            raise NotSupportedError(
                "HFPrefixCache: only decoders are supported, since a prefix of an encoder-decoder "
                "depends on the encoder's input"
            )
        name = type(generating(model)).__name__
        if "mamba" in name.lower():
            raise NotSupportedError(f"HFPrefixCache: {name}.generate() ignores the states that it is given")
        plan = layer_plan(model.config)
        both_ways = getattr(plan.config, "use_bidirectional_attention", None) in (True, "all")
        if both_ways or getattr(plan.config, "is_causal", True) is False:
            raise NotSupportedError(
                f"HFPrefixCache: in {name} the tokens of a prompt attend to later ones too "
                "(use_bidirectional_attention, is_causal), so prefixes cannot be shared; call model.generate"
            )
        ranks = getattr(model, "tp_size", None) or 1
        self._check_options(HFPrefixCache, options, _CACHE_OPTIONS, ranks, THEIRS, ArgumentError)
        for trait in (Trait.INSIDE, Trait.UNEVEN, Trait.COMPRESSED):
            plan.refuse("HFPrefixCache", trait, "prefixes cannot be shared")
        self.by_one = Trait.BY_ONE in plan.traits
        self.model = model
        self.adapters = Adapters(model)
        self.cache = HFCache(
            model.config, max_sequences=max_sequences, capacity=capacity,
            **{name: options.pop(name) for name in _CACHE_OPTIONS if name in options},
        )  # fmt: skip
        family = self.cache.bind(torch.empty(0, dtype=model.dtype, device=device_of(model)))
        pool = self.cache.rows.pool
        pool.know(layer_devices(getattr(model, "hf_device_map", {})))
        pool.sequences.give_away()
        self._family, self._layers = family, len(plan.layers)
        if plan.indexed or plan.compressed:  # which store more, under separate indices
            self._layers = plan.numbers
        self.longest_pass = min((family.kept(kind) or capacity for kind in family.caches), default=capacity)
        """The tokens that windows keep; a longer pass would allow no snapshots inside it."""
        self.room = min((cache.cells for cache in family.whole), default=math.inf)
        """The most tokens of all conversations together; infinity if only windows are kept."""
        self.limit = rotation_limit(model.config)
        """The most tokens of a conversation, and the reason; None: limited by the room only."""
        self._placing = [part for part in getattr(model, "modules", list)() if "rope_deltas" in vars(part)]
        whole: Any = family.all
        self.lock: Turns = Turns(whole.take_over)  # also held across the passes of a caller's loop
        tiers = options.get("tiers") or ()
        if not isinstance(tiers, Sequence):
            tiers = ()  # PrefixCache refuses it
        stores = [tier for tier in tiers if not isinstance(tier, HostTier)]
        shapes = functools.partial(self._stored_layers, whole) if stores else lambda: None
        if batch_invariant:
            whole.set_config(invariant_config(pool.backend))
            options["whole_blocks"] = True
        self.prefix = PrefixCache(whole, **prefix_options(options, shapes))

    def _stored_layers(self, whole: Any) -> LayerShapes:
        """What the model stores in each layer, determined by a pass over one token, which is then removed."""
        with PrefixCache(whole) as self.prefix, self.begin([0, 0]) as session:
            session.prefill()
            return layers_of_cache(whole)

    def __dir__(self) -> list[str]:
        """The names that a user calls."""
        return sorted(
            set(super().__dir__())
            - {
                "adapters",
                "check_ids",
                "check_open",
                "by_one",
                "forget_images",
                "is_compileable",
                "limit",
                "longest_pass",
                "named",
                "room",
                "vocabulary",
            }
        )

    @property
    def is_compileable(self) -> bool:
        """The first attribute that ``generate`` reads of a cache."""
        raise AttributeError(
            "HFPrefixCache: model.generate needs the cache of one conversation; call the HFPrefixCache's own "
            "generate, or pass begin(tokens).cache"
        )

    def vocabulary(self) -> int | None:
        """How many token ids the model's embedding has; None: not known."""
        embeddings = getattr(generating(self.model), "get_input_embeddings", lambda: None)
        try:
            size: int | None = getattr(embeddings(), "num_embeddings", None)
        except NotImplementedError:
            return None
        return size

    def named(self, cache: HFCache) -> dict[str, HFCache]:
        """A cache under the name of ``generate``'s argument."""
        return {cache_argument(self.model): cache}

    def forget_images(self) -> None:
        """Make the model count positions as in plain text, regardless of earlier images or padding."""
        for part in self._placing:
            part.rope_deltas = None

    @in_turn
    def begin(
        self,
        tokens: Sequence[int],
        salt: str = "",
        shared: int = 0,
        *,
        session_id: str = "",
        next_use: float | None = None,
    ) -> HFSession:
        """Start a conversation with a prompt, from its longest cached prefix. ``salt`` and ``shared`` control
        sharing, ``session_id`` and ``next_use`` say whose request it is, as in ``PrefixCache.begin``; ``with
        cache.lock:``, ``prefix.agent_sessions`` closes, retains or deletes what an agent used. With PEFT
        adapters, prefixes are shared among conversations whose adapters have the same content and scales.
        """
        self.check_open("begin")
        variant = self.adapters.variant()
        if len(tokens) > self.room:
            raise InvalidRangeError(
                f"begin: a prompt of {len(tokens)} tokens; there is room for {self.room}, answers included: "
                "make the HFPrefixCache with a larger capacity or max_sequences"
            )
        if self.limit is not None:
            check_rotation("begin", len(tokens), self.limit)
        tokens = self.check_ids("begin", tokens)
        session = self.prefix.begin(
            tokens, salt, shared, variant=variant, session_id=session_id, next_use=next_use
        )
        stored = {i for cache in self._family.caches.values() for i in cache.storage.buffers}
        strange = sorted(i for i in stored if i >= self._layers)
        if strange:
            session.close(keep=False)
            raise InvalidRangeError(
                f"begin: the entries under this identity= have layers {strange}, but the model's are below "
                f"{self._layers}; they belong to another model: give this one its own identity"
            )
        self.forget_images()
        return HFSession(self, session, variant)

    @in_turn
    def generate(
        self,
        /,
        input_ids: torch.Tensor,
        *,
        prefill_size: int = 512,
        salt: str = "",
        shared: int = 0,
        session_id: str = "",
        next_use: float | None = None,
        **options: Any,
    ) -> Any:
        """``model.generate(input_ids, **options)`` for one conversation, (1, tokens), from its cached prefix.
        A tokenizer's output can be passed directly: ``generate(**tokenizer(text, return_tensors="pt"))``.
        Padding, several rows, beams, several answers, and inputs besides the tokens (images, positions) are
        refused.

        An answer that may exceed the room (``max_sequences * capacity``, including the prompt) ends there,
        which is logged in advance. Raises CacheFullError if other open sessions use the room.
        """
        _check_one_row(input_ids, options)
        _check_inputs(self.model, options)
        prompt = input_ids[0].tolist()
        with self.begin(prompt, salt, shared, session_id=session_id, next_use=next_use) as session:
            session.prefill(prefill_size)
            if options.get("custom_generate") is not None:  # which may draft tokens
                session.cache.rows.drafts = MOST_DRAFTS
            with _given_the_rest(self.model, session.cache):
                out = self.model.generate(
                    input_ids,
                    attention_mask=torch.ones_like(input_ids),
                    **self.named(session.cache),
                    **options,
                )
            sequences = out if isinstance(out, torch.Tensor) else out.sequences
            tokens = sequences[0].tolist()
            if tokens[: len(prompt)] != prompt:  # the cache then has other tokens' keys
                session.close(keep=False)
            else:
                session.extend(tokens[len(prompt) :])
        return out
