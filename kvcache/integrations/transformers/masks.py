"""Refuses masks that do not fit a cache, when transformers creates them, since it does not pass masks to
caches.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import masking_utils
from transformers.utils.import_utils import is_tracing

from kvcache import InvalidRangeError, NotSupportedError

__all__ = ["check_padding", "check_positions", "check_width", "trim_masks", "watch_masks"]

_RECURRENT = "create_recurrent_attention_mask"
_MADE_BY = (
    "create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask", _RECURRENT,
)  # fmt: skip


def check_width(mask: torch.Tensor, stored: int, tokens: int) -> None:
    """Raise InvalidRangeError unless the mask's width is ``stored`` tokens plus ``tokens`` new ones."""
    if mask.shape[1] != stored + tokens:
        raise InvalidRangeError(
            f"HFCache: an attention_mask of {mask.shape[1]} columns for {tokens} new tokens after {stored} "
            f"stored ones; it must have {stored + tokens}, one for each, and none for what remove() took out"
        )


def check_positions(arguments: Mapping[str, Any], stored: int, tokens: int, removed: int) -> None:
    """Raise InvalidRangeError for positions that count tokens removed by ``remove``. ``generate`` counts
    positions by its mask, which it does not pass to the model if it is all ones.
    """
    positions = arguments.get("position_ids")
    last = -1 if positions is None else int(positions.max())
    if last >= stored + tokens:
        raise InvalidRangeError(
            f"HFCache: position {last} for {tokens} new tokens after {stored} stored ones: {removed} were "
            "removed, and later ones have moved down; pass tokens, attention_mask and position_ids without "
            "the removed ones"
        )


def check_padding(
    model_type: str, mask: torch.Tensor, tokens: int, begun: Callable[[torch.Tensor, int], torch.Tensor]
) -> None:
    """Raise NotSupportedError for a mask (rows, tokens so far), for a pass of ``tokens``, with padding that
    would enter the states. Padding on the left of a row's first token does not, in a pass of several tokens;
    ``begun``, of this mask and ``tokens``: by row, whether the states have a token of it.
    """
    hidden = mask[:, -tokens:] == 0
    if not bool(hidden.any()):
        return
    if tokens > 1:
        hidden &= begun(mask, tokens)[:, None] | (mask[:, -tokens:].cumsum(1) > 0)
    where = hidden.nonzero()
    if len(where):
        row, column = where[0].tolist()
        raise NotSupportedError(
            f"HFCache: the attention_mask hides token {mask.shape[1] - tokens + column} of row {row}, which "
            f"would still enter the recurrent states of {model_type}; pad only on the left of the first "
            "prompt, and use separate caches for conversations that continue with turns of different lengths"
        )


def watch_masks(kind: type) -> None:
    """Make caches of class ``kind`` check the masks created for them (``check_mask``)."""
    for name in _MADE_BY:
        original: Any = getattr(masking_utils, name)
        if not hasattr(original, "watches"):
            _replace(name, original, _watched(original, kind, name == _RECURRENT))


_UNTRIMMED = {"mamba": "MambaModel", "falcon_mamba": "FalconMambaModel"}
"""Models that pass a mask to their mixers as it is, for all columns."""


def trim_masks(model_type: str) -> None:
    """Make models of this type, if they do not, create the mask of their states as all others do: it is
    checked, and has the columns of the pass. With other caches their behaviour is unchanged.
    """
    if model_type not in _UNTRIMMED:
        return
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    model = getattr(module, _UNTRIMMED[model_type])
    original = model.forward
    if hasattr(original, "trims"):
        return

    @functools.wraps(original)
    def forward(self: Any, input_ids: Any = None, *args: Any, **options: Any) -> Any:
        mask, cache = options.get("attention_mask"), options.get("cache", options.get("cache_params"))
        new = options.get("inputs_embeds") if input_ids is None else input_ids
        if mask is not None and new is not None and hasattr(cache, "check_mask"):
            made: Any = getattr(masking_utils, _RECURRENT)
            options["attention_mask"] = made(self.config, new, mask, cache)
        return original(self, input_ids, *args, **options)

    forward.trims = True  # type: ignore[attr-defined]
    model.forward = forward


def _watched(original: Any, kind: type, recurrent: bool) -> Any:
    @functools.wraps(original)
    def create(*args: Any, **options: Any) -> Any:
        arguments = (
            dict(zip(("config", "inputs_embeds", "attention_mask", "cache"), args, strict=False)) | options
        )
        mask, cache = (
            arguments.get("attention_mask"),
            arguments.get("cache", arguments.get("past_key_values")),
        )
        if (
            isinstance(cache, kind)
            and isinstance(mask, torch.Tensor)
            and mask.ndim == 2
            and not is_tracing(mask)
        ):
            cache.check_mask(mask, arguments["inputs_embeds"].shape[1], recurrent)  # type: ignore[attr-defined]
        return original(*args, **options)

    create.watches = kind  # type: ignore[attr-defined]
    return create


def _replace(name: str, original: Any, watched: Any) -> None:
    """Replace it in all modules that import it by name, and in transformers' table of masks by kinds of
    layers.
    """
    for module in [*sys.modules.values()]:
        if getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, watched)
    patterns: dict[str, Any] = masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING
    for table in [patterns, *(made for made in patterns.values() if isinstance(made, dict))]:
        table.update({key: watched for key, made in table.items() if made is original})
