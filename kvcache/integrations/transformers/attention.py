"""``attn_implementation="kvcache"``: transformers' models attend by our caches, for a whole batch at once.

``HFCache.update`` then returns deferred K and V, and the mask is deferred too. If attention receives both
unchanged, the cache computes it, without dense K, V or mask. Otherwise transformers' own attention runs on
the materialized tensors.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.utils.generic import TransformersKwargs
from transformers.utils.import_utils import is_tracing

from kvcache import NotSupportedError
from kvcache.integrations.transformers.deferred import Deferred
from kvcache.integrations.transformers.kinds import ATTENTION
from kvcache.integrations.transformers.packed import PassKeys
from kvcache.integrations.transformers.stored import Stored

__all__ = ["attention", "causal_mask", "silently"]

_MISSING = object()
_log = logging.getLogger("kvcache.transformers")
_SAYS_NOTHING = {
    *TransformersKwargs.__annotations__, "deterministic", "labels", "logits_to_keep", "mm_token_type_ids",
    "return_dict", "sliding_window", "token_type_ids", "use_cache",
} - {"output_attentions"}  # fmt: skip
"""Keywords implied by the mask, or for other parts of a model that pass on all their keywords."""
_SDPA = {*inspect.signature(sdpa_attention_forward).parameters, "indices"}
"""Keywords that SDPA supports; ``indices`` through its mask."""
_KNOWN = {*_SDPA, "output_attentions", "softcap"}
_IN_EAGER = {"s_aux": "sinks"}
"""Keywords whose value a model's own attention reads from its module."""


class _Pattern:
    """A causal mask, with a window or chunk and padding, as transformers would make it from ``options``."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.padding: torch.Tensor | None = options["attention_mask"]
        self.size: int = options.get("local_size") or 0

    def boolean(self, skip: bool) -> torch.Tensor | None:
        """The mask for SDPA; None if ``is_causal`` is equivalent and ``skip`` allows it."""
        mask: torch.Tensor | None = sdpa_mask(**{**self.options, "allow_is_causal_skip": skip})
        return mask

    def additive(self) -> torch.Tensor:
        """The additive mask, for models' own code and for SDPA."""
        mask: torch.Tensor = eager_mask(**self.options)
        return mask


def causal_mask(**options: Any) -> torch.Tensor | None:
    """The function for transformers' mask interface; a plain causal mask is deferred until it is read."""
    padding = options["attention_mask"]
    if not options.get("allow_is_causal_skip", True) or is_tracing(padding):
        mask: torch.Tensor | None = eager_mask(**options)
        return mask
    if isinstance(options.get("q_offset"), torch.Tensor):  # a static layer's counter, which update() advances
        options["q_offset"] = options["q_offset"].clone()
    pattern = _Pattern(options)
    shape = options["batch_size"], 1, options["q_length"], options["kv_length"]
    like = torch.empty((), dtype=options["dtype"], device=options["device"])
    mask = Deferred.of(like, shape, pattern.additive)
    mask.pattern = pattern
    return mask


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention (rows, tokens, heads, v_dim) of query (rows, heads, tokens, head_dim), weights or None."""
    compiled = torch.compiler.is_compiling()
    asked = []
    if not _SAYS_NOTHING.issuperset(options):
        asked = [name for name, option in options.items() if _says(module, name, option)]
    reason = "" if compiled else _other_way(query, key, value, attention_mask, dropout, asked)
    if reason is None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        made: Any = attention_mask
        ours: Any = key
        out = ours.stored.attend(query, (key, value), scale, s_aux, made.pattern.padding)
        if out is not None:
            return out, None
        reason = "its mask is padded although the layer sees chunks, or its length differs from the cache's"
    if reason and not _silent.get():
        _say(type(module).__name__, reason)
    if s_aux is not None:
        options["s_aux"] = s_aux
        asked.append("s_aux")
    keys: Any = getattr(key, "stored", None)
    if isinstance(keys, PassKeys) and keys.several:
        said = {name: options[name] for name in (*asked, "is_causal") if name in options}
        said |= {"dropout": dropout, "scaling": scaling}
        return keys.each(attention, causal_mask, module, query, attention_mask, said)
    body = None if _SDPA.issuperset(asked) else _eager(module, asked, reason or "")
    chosen, made = options.get("indices"), attention_mask
    if isinstance(made, Deferred):
        if body or made.made is not None:
            made = made.resolve()
        else:
            causal = options.get("is_causal", getattr(module, "is_causal", True))
            made = made.pattern.boolean(bool(causal) and chosen is None and query.shape[2] > 1)
    if chosen is not None:
        made = _only(made, chosen, key)
    key, value = (x.resolve() if isinstance(x, Deferred) else x for x in (key, value))
    attended: tuple[torch.Tensor, torch.Tensor | None] = (body or sdpa_attention_forward)(
        module, query, key, value, made, dropout=dropout, scaling=scaling, **options
    )
    return attended


def _says(module: torch.nn.Module, name: str, value: object) -> bool:
    """Whether a keyword has an effect; an unknown one counts unless the module only passes it on."""
    if name in _SAYS_NOTHING:
        return False
    kind: Any = type(module)  # mypy takes the class of a Module for unhashable
    read = _read_by(_eager_of(kind))
    if name in read:
        return value is not read[name]
    if value is None or value is False:
        return False
    return name in _KNOWN or isinstance(value, torch.Tensor | float) or name in _own_names(kind)


def _eager_of(kind: type) -> Callable[..., Any] | None:
    """A model's own attention in plain operations, by the class of its attention layers."""
    for one in kind.__mro__:
        body: Callable[..., Any] | None = getattr(
            sys.modules[one.__module__], "eager_attention_forward", None
        )
        if body is not None:
            return body
    return None


@functools.cache
def _read_by(body: Callable[..., Any] | None) -> dict[str, object]:
    """The keywords that a function reads, by its parameters or from its ``**kwargs``, and their defaults."""
    code = getattr(inspect.unwrap(body), "__code__", None) if body else None
    if body is None or code is None:
        return {}
    parameters = inspect.signature(body).parameters.values()
    constants: dict[str, object] = dict.fromkeys(one for one in code.co_consts if isinstance(one, str))
    return constants | {one.name: one.default for one in parameters if one.kind is not one.VAR_KEYWORD}


@functools.cache
def _own_names(kind: type) -> frozenset[object]:
    """The constants in the code of a module's class, which include the keywords that it passes by name."""
    names: set[object] = set()
    for one in itertools.takewhile(lambda one: one is not torch.nn.Module, kind.__mro__):
        for member in vars(one).values():
            code = getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None
            for constant in code.co_consts if code is not None else ():
                names.update(constant if isinstance(constant, tuple) else (constant,))
    return frozenset(names)


def _other_way(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    asked: Sequence[str],
) -> str | None:
    """Why transformers' own attention is used, "" if that need not be logged; None if the cache attends."""
    stored: Any = getattr(key, "stored", _MISSING)
    if not isinstance(mask, Deferred) or mask.made is not None:
        return "" if stored is _MISSING else "its mask is more than causal"
    if stored is _MISSING:
        return "its keys and values do not come from an HFCache of this model's config"
    if stored is None:  # a prompt of which a window keeps only the end
        return ""
    layer_part: Stored = stored
    if getattr(value, "stored", None) is not layer_part or getattr(key, "made", None) is not None:
        return "the model changes the cache's keys and values before attention"
    pattern: _Pattern = mask.pattern
    if pattern.size != layer_part.kind.size or query.shape[2] != layer_part.current.tokens:
        return "its mask differs from that of the cache's layer"
    if asked:
        return f"it asks for {asked[0]}"
    if dropout:
        return "it asks for dropout"
    if query.requires_grad and torch.is_grad_enabled():
        return "gradients are recorded: call it under torch.no_grad() if none are needed"
    return None


def _only(mask: torch.Tensor | None, chosen: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A mask (rows, 1, tokens, keys), additive or BOOL, limited to the keys that an indexer has chosen.
    ``chosen`` are keys (rows, tokens, k). For "eager" and "sdpa", models apply them to the mask themselves.
    """
    if mask is None:  # nothing else is hidden
        mask = torch.ones((*chosen.shape[:2], key.shape[2]), dtype=torch.bool, device=chosen.device)[:, None]
    hidden = torch.ones_like(mask, dtype=torch.bool).scatter(-1, chosen.long()[:, None], False)
    return mask.masked_fill(hidden, False if mask.dtype is torch.bool else torch.finfo(mask.dtype).min)


def _eager(module: torch.nn.Module, asked: Sequence[str], reason: str) -> Callable[..., Any]:
    """The model's own attention in plain operations. Raises NotSupportedError unless it supports all of
    ``asked``.
    """
    body = _eager_of(type(module))
    code = getattr(inspect.unwrap(body), "__code__", None) if body else None
    known = {"output_attentions", "indices"} if body else set()
    if code is not None:
        known |= {*_read_by(body), *code.co_names}
    strange = [name for name in asked if name not in known and _IN_EAGER.get(name) not in known]
    if body is None or strange:
        raise NotSupportedError(
            f"attn_implementation={ATTENTION!r}: {type(module).__name__} asks for "
            f"{', '.join(strange or asked)}, which neither the cache nor the attention in its module supports"
            f"{f' ({reason})' if reason else ''}; choose an implementation that the model has, such as "
            "'eager'"
        )
    return body


_silent: ContextVar[bool] = ContextVar("silent", default=False)


@contextlib.contextmanager
def silently() -> Iterator[None]:
    """In this block, falling back to transformers' own attention is not logged."""
    before = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(before)


@functools.cache
def _say(module: str, reason: str) -> None:
    """Log a fallback, once for each module and reason."""
    _log.warning("attn_implementation=%r: %s uses transformers' own attention: %s", ATTENTION, module, reason)


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, causal_mask)
