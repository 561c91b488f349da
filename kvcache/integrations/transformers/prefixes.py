"""Conversations with a transformers model that never recompute a prefix that they share."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import ml
from kvcache import InvalidRangeError, KVCacheError, NotSupportedError
from kvcache.caches.turns import Turns, in_turn
from kvcache.integrations.conversations import (
    MOST_DRAFTS,
    Conversation,
    SharedPrefixes,
    invariant_config,
    prefix_options,
)
from kvcache.integrations.transformers.adapters import Adapters
from kvcache.integrations.transformers.arguments import THEIRS, ArgumentError, check_model, check_type
from kvcache.integrations.transformers.bridge import HFDType
from kvcache.integrations.transformers.cache import HFCache, cache_argument, generating
from kvcache.integrations.transformers.kinds import Trait, layer_plan
from kvcache.integrations.transformers.places import device_of, layer_devices
from kvcache.integrations.transformers.rope import check_rotation, rotation_limit
from kvcache.prefix.prefix_cache import PrefixCache, Session
from kvcache.prefix.tiers import HostTier
from kvcache.snapshots.layer_shapes import Layers, layers_of_cache
from kvcache.stores import Part

__all__ = ["HFPrefixCache", "HFSession"]


class HFSession(Conversation):
    """One conversation: ``cache`` is its HFCache, and holds ``cached`` of the prompt's tokens.

    In a loop of your own, give the model ``remaining``, the tokens that the cache lacks, and nothing twice;
    tell what was sampled by ``extend``. (``generate`` of transformers takes all tokens, and finds out by
    itself.) If other tokens are evaluated than the session is told, nobody can notice, and later
    conversations start from the wrong keys and values. Calls of the session wait for those of other threads;
    passes of a loop of your own do not, and a thread whose pass another one ended gets OrderError: let the
    loop hold ``HFPrefixCache.lock`` where several threads have one.
    """

    def __init__(self, owner: HFPrefixCache, session: Session, variant: Part = None) -> None:
        """``variant``: what computes it."""
        self._owner, self._variant = owner, variant
        self.cache = type(owner.cache).of(owner.cache.rows.adopt(session.seq, session.cached))
        super().__init__(session, self.cache.rows, self.cache.get_seq_length)
        self.cache.rows.limit = owner.limit
        session.complete = self.cache.rows.complete

    @in_turn
    def prefill(self, size: int = 512) -> None:
        """Evaluate ``remaining`` but its last token, ``size`` tokens at a time at most.

        ``generate`` goes on from there. Snapshots are taken at the ends of the parts where they are due. Of a
        pass that raises nothing is left: ``remaining`` has what to evaluate again.
        """
        tokens, owner = self._session.tokens, self._owner
        owner.forget_images()
        ids = torch.tensor([tokens[:-1]], device=device_of(owner.model))
        options = {**_one_token(owner.model), **owner.named(self.cache)}
        for begin, end in self._parts(min(size, owner.longest_pass)):
            step = 1 if begin and owner.by_one else end - begin
            for upto in range(begin + step, end + 1, step):
                # A model knows itself what else it is given: positions, say, that begin at 2.
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
            if not self._owner.adapters.are(self._variant):  # who knows which of them computed what
                self._session.close(keep=False)
            yield
        finally:
            self.cache.detach()


def _one_token(model: Any) -> dict[str, Any]:
    """Options of ``generate`` for one token, whatever else the model's own config of it asks for."""
    config = model.generation_config
    own = [name for name in config.to_diff_dict() if name in vars(config) and not name.startswith("_")]
    asked = {name: None for name in own if not name.endswith("_token_id")}
    plain = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "use_cache": True}
    return {**asked, **plain, "max_new_tokens": 1}


_patching = threading.Lock()
_patched: dict[int, tuple[list[HFCache], Any]] = {}
"""By the id of a model that generates, the caches of conversations that do, and what it had of its own."""


@contextlib.contextmanager
def _given_the_rest(model: Any, cache: HFCache) -> Iterator[None]:
    """Give the model what the cache lacks: assisted decoding begins with all tokens, whatever is there.

    Calls of ``generate`` with another cache, from other threads or a streamer, are left alone.
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
    @functools.wraps(prepare)  # generate() looks at its parameters
    def prepare_rest(
        input_ids: torch.Tensor, next_sequence_length: int | None = None, **options: Any
    ) -> dict[str, Any]:
        ours = [value for value in options.values() if any(value is cache for cache in caches)]
        lacking = input_ids.shape[1] - ours[0].get_seq_length() if ours else 0
        if next_sequence_length is None and lacking > 0:  # chunks of a prefill come without what is cached
            next_sequence_length = lacking
        prepared: dict[str, Any] = prepare(input_ids, next_sequence_length=next_sequence_length, **options)
        if ours:  # drafts stand behind the prompt, however many
            ours[0].rows.drafts = max(0, input_ids.shape[1] - ours[0].rows.prompt)
        return prepared

    return prepare_rest


def _check_one_row(input_ids: object, options: dict[str, Any]) -> None:
    """Refuse what is not one conversation, and take its mask, which says nothing, out of the options."""
    wanted = "a tensor (1, tokens), as tokenizer(text, return_tensors='pt').input_ids is"
    check_type("generate", "input_ids", input_ids, wanted, isinstance(input_ids, torch.Tensor))
    assert isinstance(input_ids, torch.Tensor)
    shape = tuple(input_ids.shape)
    if len(shape) != 2 or shape[0] != 1:
        raise InvalidRangeError(f"generate: input_ids {shape}; their shape must be (1, tokens)")
    mask = options.pop("attention_mask", None)
    if mask is not None and (tuple(mask.shape) != shape or not bool(mask.all())):
        raise InvalidRangeError("generate: attention_mask hides tokens; a conversation must have no padding")
    if options.get("cache_implementation", "") is None:  # as it is passed below
        del options["cache_implementation"]
    for name in ("cache", "past_key_values", "cache_params", "cache_implementation"):
        if name in options:
            raise ArgumentError(f"generate: {name} is given; the HFPrefixCache passes a cache of its own")


_DRAFTS = "drafts from hidden states of the whole prompt, of which only the last token is computed"
_REFUSED = {
    "token_healing": "replaces the last tokens of the prompt, by which prefixes are found",
    "use_mtp": _DRAFTS,
    "speculation_type": _DRAFTS,
}
"""What a conversation cannot be generated with, and why."""
_EMBEDDED = ("codegen", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "imagegpt", "paligemma")
"""Types of models that give other results for ``token_type_ids`` of zeros than for none."""


def _asked(model: Any, options: dict[str, Any], name: str) -> Any:
    """What an option of ``generate`` is: given, or that of the given config, or of the model's own."""
    if name in options:
        return options[name]
    configs = [options.get("generation_config"), model.generation_config]
    found = [getattr(config, name, None) for config in configs]
    return next((value for value in found if value is not None), None)


def _check_inputs(model: Any, options: dict[str, Any]) -> None:
    """Refuse several rows, and what is given beside the tokens or replaces some: prefixes are found by them.

    Types of tokens that say nothing are taken out of the options. A kind of cache that a config names is left
    out of it: the cache of the conversation is passed.
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
    for name in ("token_type_ids", "mm_token_type_ids"):  # a tokenizer's: all of one text
        given = options.get(name)
        embedded = name == "token_type_ids" and model.config.model_type in _EMBEDDED
        if isinstance(given, torch.Tensor) and not bool(given.any()) and not embedded:
            del options[name]
    known = inspect.signature(generating(model).generate).parameters
    for name, value in options.items():
        parts = value if isinstance(value, list | tuple) else [value]
        if name not in known and any(isinstance(part, torch.Tensor) for part in parts):
            raise NotSupportedError(
                f"generate: {name} is given beside the tokens, by which alone prefixes are found; call "
                "model.generate with an HFCache for such inputs"
            )


class HFPrefixCache(SharedPrefixes):
    """A ``kvcache.PrefixCache`` for a decoder of transformers, sliding and hybrid ones included.

    Every conversation is a batch of one row, without padding; as many as ``max_sequences`` may be open, and
    they share ``max_sequences * capacity`` cells with what is kept of others.

    Any thread may call it, and its sessions: one call at a time is made, and the others wait. ``generate``
    holds ``lock`` from its first check to its last token, also while a slow ``streamer`` takes one.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_sequences: int = 4,
        capacity: int = 4096,
        backend: ml.Backend | str | None = None,
        dtype: HFDType | None = None,
        lookback: int = 64,
        batch_invariant: bool = False,
        **options: Any,
    ) -> None:
        """``max_sequences`` conversations of ``capacity`` tokens; ``dtype`` and ``backend`` as in HFCache.

        ``lookback`` is how many tokens sliding windows keep beyond what they show, as in HFCache.
        ``batch_invariant``: an answer does not depend on what is cached, bit for bit; prompts are evaluated
        in blocks of ``block_size`` tokens, and only such blocks are reused, no answers. ``options``
        are PrefixCache's: ``budget``, ``tiers``, ``identity``, ``block_size``, and its options. But for
        ``PrefixOptions(write_through=False)``, a thread writes each conversation to the stores when it ends.
        With a store among the ``tiers``, and without ``PrefixOptions(layers=...)``, the model is called once,
        with one token: what a store has of layers that the model does not put is not used.
        """
        check_model("HFPrefixCache", model)
        if model.config.is_encoder_decoder:
            raise NotSupportedError(
                "HFPrefixCache: only decoders are supported, since a prefix of an encoder-decoder "
                "depends on the encoder's input"
            )
        name = type(generating(model)).__name__
        if "mamba" in name.lower():
            raise NotSupportedError(
                f"HFPrefixCache: {name}.generate() starts again whatever states it is given"
            )
        plan = layer_plan(model.config)
        both_ways = getattr(plan.config, "use_bidirectional_attention", None) in (True, "all")
        if both_ways or getattr(plan.config, "is_causal", True) is False:
            raise NotSupportedError(
                f"HFPrefixCache: in {name} the tokens of a prompt attend to later ones too "
                "(use_bidirectional_attention, is_causal), so prefixes cannot be shared; call model.generate"
            )
        ranks = getattr(model, "tp_size", None) or 1
        self._check_options(HFPrefixCache, options, ranks, THEIRS, ArgumentError)
        for trait in (Trait.INSIDE, Trait.UNEVEN, Trait.COMPRESSED):
            plan.refuse("HFPrefixCache", trait, "prefixes cannot be shared")
        self.by_one = Trait.BY_ONE in plan.traits
        self.model = model
        self.adapters = Adapters(model)
        self.cache = HFCache(
            model.config, backend=backend, max_sequences=max_sequences, capacity=capacity, dtype=dtype,
            lookback=lookback,
        )  # fmt: skip
        family = self.cache.bind(torch.empty(0, dtype=model.dtype, device=device_of(model)))
        pool = self.cache.rows.pool
        pool.know(layer_devices(getattr(model, "hf_device_map", {})))
        pool.sequences.give_away()
        self._family, self._layers = family, len(plan.layers)
        if plan.indexed or plan.compressed:  # which store more, by numbers of their own
            self._layers = plan.numbers
        self.longest_pass = min((family.kept(kind) or capacity for kind in family.caches), default=capacity)
        """Tokens that windows keep: a longer pass would leave them no snapshots inside."""
        self.room = min((cache.cells for cache in family.whole), default=math.inf)
        """Tokens that all conversations may have together; infinity where only windows are kept."""
        self.limit = rotation_limit(model.config)
        """Tokens that a conversation may have, and why; None: as many as there is room for."""
        self._placing = [part for part in getattr(model, "modules", list)() if "rope_deltas" in vars(part)]
        whole: Any = family.all
        self.lock: Turns = Turns(whole.take_over)  # held over the passes of a loop of one's own, too
        tiers = options.get("tiers") or ()
        if not isinstance(tiers, Sequence):
            tiers = ()  # PrefixCache refuses it
        stores = [tier for tier in tiers if not isinstance(tier, HostTier)]
        shapes = functools.partial(self._stored_layers, whole) if stores else lambda: None
        if batch_invariant:
            whole.set_config(invariant_config(pool.backend))
            options["whole_blocks"] = True
        self.prefix = PrefixCache(whole, **prefix_options(options, shapes))

    def _stored_layers(self, whole: Any) -> Layers:
        """What the model stores in each layer, by a pass over one token, which is forgotten again."""
        with PrefixCache(whole) as self.prefix, self.begin([0, 0]) as session:
            session.prefill()
            return layers_of_cache(whole)

    def __dir__(self) -> list[str]:
        """What a user calls."""
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
        """What ``generate`` asks first of a cache that it is given."""
        raise AttributeError(
            "HFPrefixCache: model.generate takes the cache of one conversation; call generate of the "
            "HFPrefixCache itself, or pass begin(tokens).cache"
        )

    def vocabulary(self) -> int | None:
        """How many token ids the model's embedding has; None: not known."""
        found = getattr(generating(self.model), "get_input_embeddings", lambda: None)
        try:
            size: int | None = getattr(found(), "num_embeddings", None)
        except NotImplementedError:
            return None
        return size

    def named(self, cache: HFCache) -> dict[str, HFCache]:
        """A cache by the name that ``generate`` has for it."""
        return {cache_argument(self.model): cache}

    def forget_images(self) -> None:
        """Have the model count positions as in a text, whatever images or padding it was last given."""
        for part in self._placing:
            part.rope_deltas = None

    @in_turn
    def begin(self, tokens: Sequence[int], salt: str = "", shared: int = 0) -> HFSession:
        """Start a conversation with a prompt, from the longest prefix of it that is there.

        ``salt`` and ``shared`` say whose it is, as in ``PrefixCache.begin``. What adapters of PEFT compute
        is shared among conversations with the same adapters, of the same content and scales.
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
        self.check_ids("begin", tokens)
        session = self.prefix.begin(tokens, salt, shared, variant=variant)
        stored = {i for cache in self._family.caches.values() for i in cache.storage.buffers}
        strange = sorted(i for i in stored if i >= self._layers)
        if strange:
            session.close(keep=False)
            raise InvalidRangeError(
                f"begin: what is stored under this identity= has layers {strange}, and those of the model "
                f"are below {self._layers}; it is another model's: give this one an identity of its own"
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
        **options: Any,
    ) -> Any:
        """``model.generate(input_ids, **options)`` for one conversation, (1, tokens), from what is there.

        A tokenizer's output goes in as it is: ``generate(**tokenizer(text, return_tensors="pt"))``. Padding,
        several rows, beams, several answers, and inputs beside the tokens (images, positions) are refused.

        An answer for which more tokens are asked than there is room for (``max_sequences * capacity``, its
        prompt included) ends there, which the log says before it begins. CacheFullError where other open
        sessions hold the room.
        """
        _check_one_row(input_ids, options)
        _check_inputs(self.model, options)
        prompt = input_ids[0].tolist()
        with self.begin(prompt, salt, shared) as session:
            session.prefill(prefill_size)
            if options.get("custom_generate") is not None:  # which may draft without telling
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
            if tokens[: len(prompt)] != prompt:  # which is not what the cache holds keys of
                session.close(keep=False)
            else:
                session.extend(tokens[len(prompt) :])
        return out
