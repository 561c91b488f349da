"""``attn_implementation="kvcache"``: transformers' models attend by our caches, for a whole batch at once.

``HFCache.update`` then gives K and V that are not read yet, and the mask is one that is not made yet. Where
attention gets both as they came, the cache attends: no dense K, V or mask is made. Everything else is
transformers' own attention, over the tensors that these stand for.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.utils.import_utils import is_tracing

from kvcache import NotSupportedError
from kvcache.integrations.transformers.deferred import Deferred
from kvcache.integrations.transformers.kinds import ATTENTION
from kvcache.integrations.transformers.rows import untraced
from kvcache.integrations.transformers.stored import Stored

__all__ = ["attention", "causal_mask"]

_MISSING = object()
_log = logging.getLogger("kvcache.transformers")
_OTHER = ("softcap", "position_bias", "cache", "sinks", "indices", "block_indices", "output_attentions")
"""What models may ask of attention besides, and a cache does not do."""


class _Pattern:
    """A causal mask, with a window or chunk and padding, as transformers would make it from ``options``."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.padding: torch.Tensor | None = options["attention_mask"]
        self.size: int = options.get("local_size") or 0

    def boolean(self, skip: bool) -> torch.Tensor | None:
        """For SDPA; None where ``is_causal`` says it and ``skip`` allows that."""
        found: torch.Tensor | None = sdpa_mask(**{**self.options, "allow_is_causal_skip": skip})
        return found

    def additive(self) -> torch.Tensor:
        """For code of a model's own, which adds it, and for SDPA alike."""
        found: torch.Tensor = eager_mask(**self.options)
        return found


def causal_mask(**options: Any) -> torch.Tensor | None:
    """What the mask interface asks for; a plain causal mask is not made before it is looked into."""
    padding = options["attention_mask"]
    if not options.get("allow_is_causal_skip", True) or is_tracing(padding):
        found: torch.Tensor | None = eager_mask(**options)
        return found
    if isinstance(options.get("q_offset"), torch.Tensor):  # a static layer's counter, which update() advances
        options["q_offset"] = options["q_offset"].clone()
    pattern = _Pattern(options)
    shape = options["batch_size"], 1, options["q_length"], options["kv_length"]
    like = torch.empty((), dtype=options["dtype"], device=options["device"])
    found = Deferred.of(like, shape, pattern.additive)
    found.pattern = pattern
    return found


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
    reason = "" if compiled else _other_way(query, key, value, attention_mask, dropout, options)
    if reason is None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        made: Any = attention_mask
        out = _attend(key, query, (key, value), scale, s_aux, made.pattern.padding)
        if out is not None:
            return out, None
        reason = "its mask is padded where the layer sees chunks, or is of another length than the cache"
    if reason:
        _say(type(module).__name__, reason)
    asked = any(options.get(name) for name in ("output_attentions", "softcap")) or s_aux is not None
    body = _eager(module) if asked else None
    made = attention_mask
    if isinstance(made, Deferred):
        made = made.resolve() if body or made.made is not None else made.pattern.boolean(query.shape[2] > 1)
    chosen = options.get("indices")
    if chosen is not None and made is not None:
        made = _only(made, chosen)
    if s_aux is not None:
        options["s_aux"] = s_aux
        if body is None:
            raise NotSupportedError(
                f"attn_implementation={ATTENTION!r}: {type(module).__name__} has sinks, no attention of its "
                f"own that knows them, and {reason or 'is compiled'}; pass an HFCache(model.config)"
            )
    key, value = (x.resolve() if isinstance(x, Deferred) else x for x in (key, value))
    found: tuple[torch.Tensor, torch.Tensor | None] = (body or sdpa_attention_forward)(
        module, query, key, value, made, dropout=dropout, scaling=scaling, **options
    )
    return found


def _other_way(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    options: dict[str, Any],
) -> str | None:
    """Why transformers' own attention is called, "" where that needs no saying; None: the cache attends."""
    stored: Any = getattr(key, "stored", _MISSING)
    if not isinstance(mask, Deferred) or mask.made is not None:
        return "" if stored is _MISSING else "its mask says more than causal attention"
    if stored is _MISSING:
        return "its keys and values are not as an HFCache of this model's config gave them"
    if stored is None:  # a prompt of which a window keeps the end alone
        return ""
    found: Stored = stored
    if getattr(value, "stored", None) is not found or getattr(key, "made", None) is not None:
        return "the model changes keys and values of the cache before it attends to them"
    pattern: _Pattern = mask.pattern
    if pattern.size != found.kind.size or query.shape[2] != found.current.tokens:
        return "its mask is not that of the cache's layer"
    for name in _OTHER:
        if options.get(name) is not None and options[name] is not False:
            return f"it asks for {name}"
    if dropout:
        return "it asks for dropout"
    if query.requires_grad and torch.is_grad_enabled():
        return "gradients are recorded: call it under torch.no_grad() where none are needed"
    return None


def _only(mask: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """A mask (rows, 1, tokens, keys), additive or BOOL, that shows what an indexer has chosen alone.

    ``chosen`` are keys (rows, tokens, k). Models fold them into the masks of "eager" and "sdpa" themselves.
    """
    hidden = torch.ones_like(mask, dtype=torch.bool).scatter(-1, chosen.long()[:, None], False)
    return mask.masked_fill(hidden, False if mask.dtype is torch.bool else torch.finfo(mask.dtype).min)


@untraced
def _attend(key: Any, *arguments: Any) -> torch.Tensor | None:
    found: torch.Tensor | None = key.stored.attend(*arguments)
    return found


def _eager(module: torch.nn.Module) -> Callable[..., Any] | None:
    """The model's own attention in plain operations, which knows all that it may be asked for."""
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)


@functools.cache
def _say(module: str, reason: str) -> None:
    """Once for each module and reason."""
    _log.warning(
        "attn_implementation=%r: %s takes transformers' own attention: %s", ATTENTION, module, reason
    )


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, causal_mask)
