"""Masks that do not fit a cache: refused where transformers makes them, which shows no cache its mask."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

import torch
from transformers import masking_utils
from transformers.utils.import_utils import is_tracing

from kvcache import InvalidRangeError, NotSupportedError

__all__ = ["check_padding", "check_positions", "check_width", "watch_masks"]

_RECURRENT = "create_recurrent_attention_mask"
_MADE_BY = (
    "create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask", _RECURRENT,
)  # fmt: skip


def check_width(mask: torch.Tensor, held: int, tokens: int) -> None:
    """Refuse a mask of another width than the ``held`` tokens and ``tokens`` new ones: InvalidRangeError."""
    if mask.shape[1] != held + tokens:
        raise InvalidRangeError(
            f"HFCache: an attention_mask of {mask.shape[1]} columns for {tokens} new tokens behind {held} "
            f"that are held; it must have {held + tokens}, without the columns that remove() took out"
        )


def check_positions(given: Mapping[str, Any], held: int, tokens: int, removed: int) -> None:
    """Refuse positions that count tokens which ``remove`` took out: InvalidRangeError.

    ``generate`` counts them by its mask, of which it shows the model nothing if all of it is ones.
    """
    positions = given.get("position_ids")
    last = -1 if positions is None else int(positions.max())
    if last >= held + tokens:
        raise InvalidRangeError(
            f"HFCache: position {last} for {tokens} new tokens behind {held} that are held: {removed} were "
            "removed, and later ones have moved down; pass tokens, attention_mask and position_ids without "
            "what was removed"
        )


def check_padding(model_type: str, mask: torch.Tensor, held: int, tokens: int) -> None:
    """Refuse a mask (rows, tokens so far) of a pass of ``tokens`` with padding that enters the states.

    That on the left of a row's first token does not, in a pass of several: NotSupportedError for others, and
    where a mask of fewer columns than the ``held`` tokens and the new ones does not tell which was the first.
    """
    hidden = mask[:, -tokens:] == 0
    if not bool(hidden.any()):
        return
    if tokens > 1 and mask.shape[1] >= held + tokens:
        hidden &= mask.cumsum(1)[:, -tokens:] > 0
    where = hidden.nonzero()
    if len(where):
        row, column = where[0].tolist()
        raise NotSupportedError(
            f"HFCache: the attention_mask hides token {mask.shape[1] - tokens + column} of row {row}, which "
            f"would enter the recurrent states of {model_type} all the same; pad on the left of the first "
            "prompt only, and give conversations that go on with turns of other lengths caches of their own"
        )


def watch_masks(kind: type) -> None:
    """From now on have caches of class ``kind`` check the masks that are made for them (``check_mask``)."""
    for name in _MADE_BY:
        original: Any = getattr(masking_utils, name)
        if not hasattr(original, "watches"):
            _replace(name, original, _watched(original, kind, name == _RECURRENT))


def _watched(original: Any, kind: type, recurrent: bool) -> Any:
    @functools.wraps(original)
    def create(*args: Any, **options: Any) -> Any:
        given = (
            dict(zip(("config", "inputs_embeds", "attention_mask", "cache"), args, strict=False)) | options
        )
        mask, cache = given.get("attention_mask"), given.get("cache", given.get("past_key_values"))
        if (
            isinstance(cache, kind)
            and isinstance(mask, torch.Tensor)
            and mask.ndim == 2
            and not is_tracing(mask)
        ):
            cache.check_mask(mask, given["inputs_embeds"].shape[1], recurrent)  # type: ignore[attr-defined]
        return original(*args, **options)

    create.watches = kind  # type: ignore[attr-defined]
    return create


def _replace(name: str, original: Any, watched: Any) -> None:
    """In all modules that have it by its name, and in transformers' table of masks by kinds of layers."""
    for module in [*sys.modules.values()]:
        if getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, watched)
    patterns: dict[str, Any] = masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING
    for table in [patterns, *(made for made in patterns.values() if isinstance(made, dict))]:
        table.update({key: watched for key, made in table.items() if made is original})
