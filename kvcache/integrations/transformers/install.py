"""Wraps the preparation of ``generate()``: answers end when a cache is full, and ``install`` makes it use our
caches. Importing this module wraps the method of ``generate`` that prepares caches. Without ``install``, this
affects only calls with one of our caches.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import transformers
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.generation.utils import GenerationMixin

import ml
from kvcache import OrderError
from kvcache.integrations.transformers.bridge import HFDType, dtype_of
from kvcache.integrations.transformers.cache import HFCache, HFEncoderDecoderCache, cache_argument
from kvcache.integrations.transformers.kinds import Trait, layer_plan
from kvcache.integrations.transformers.layers import RowsCache
from kvcache.integrations.transformers.static import HFStaticCache

__all__ = ["Installation", "install", "uninstall"]

_NAME = "_prepare_cache_for_generation"
_CROSSED = {"encoder_outputs", "encoder_hidden_states"}
"""The arguments with another model's encoder output for a decoder."""
_log = logging.getLogger("kvcache.transformers")
_installed: Installation | None = None


class Installation(AbstractContextManager["Installation"]):
    """The effect of ``install`` on ``generate``; a context manager that ends it."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def __repr__(self) -> str:
        state = "installed" if _installed is self else "uninstalled"
        return f"<kvcache in transformers' generate(), {state}>"

    def uninstall(self) -> None:
        """Restore transformers' own caches in ``generate``. A second call has no effect."""
        global _installed
        if _installed is self:
            _installed = None

    def __exit__(self, *error: object) -> None:
        self.uninstall()


def install(
    *,
    backend: ml.Backend | str | None = None,
    capacity: int = 0,
    dtype: HFDType | None = None,
    lookback: int = 64,
) -> Installation:
    """Make ``generate()`` use an HFCache in place of a DynamicCache, and an HFStaticCache in place of a
    StaticCache (``cache_implementation="static"``).

    A cache is as large as the call requires, and at least ``capacity`` tokens per row; one passed to a later
    call grows between the calls. The other options are HFCache's. Caches passed by callers, and offloaded and
    quantized ones, are not replaced; neither are those of models with unsupported layers, which is logged.
    ``uninstall()``, or leaving ``with install():``, undoes it.

    Raises OrderError for a second ``install`` without ``uninstall``.
    """
    global _installed
    if _installed is not None:
        raise OrderError("install: it is already installed; call uninstall() first to change its options")
    options = {"backend": backend, "capacity": capacity, "dtype": dtype, "lookback": lookback}
    _installed = Installation(options)
    return _installed


def uninstall() -> None:
    """Undo ``install``; no effect without one."""
    if _installed is not None:
        _installed.uninstall()


def _prepare(
    original: Callable[..., Any],
    model: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    generation_mode: Any,
    batch_size: int,
    max_cache_length: int,
) -> Any:
    """Called by ``generate`` before its first pass, when the longest possible text is known."""
    name, installed = cache_argument(model), _installed
    passed = model_kwargs.get(name)
    prepared = original(model, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
    if installed is not None:
        _check_name(name, model_kwargs)
        if isinstance(passed, HFCache) and not passed.rows.pool.given_away:
            passed.reserve(max_cache_length)
        elif passed is None:
            wanted = generation_config.use_cache is not False
            crosses = not _CROSSED.isdisjoint(k for k, x in model_kwargs.items() if x is not None)
            theirs = model_kwargs.get(name)
            ours = _ours(model, theirs, max_cache_length, installed.options, crosses) if wanted else None
            if ours is not None:
                model_kwargs[name] = ours
                if generation_config.is_assistant:
                    ours.activate_past_recording()
    if isinstance(passed, RowsCache) and generation_config.num_beams == 1:  # beams share cells
        _end_in_time(passed, generation_config, batch_size, max_cache_length)
    return prepared


def _end_in_time(cache: RowsCache, generation_config: Any, batch: int, length: int) -> None:
    """End an answer when the cache is full, instead of losing it to an error; a warning is logged. ``length``
    is the most tokens of each row. A prompt that does not fit is refused by its pass.
    """
    most = cache.rows.most(batch * (generation_config.num_return_sequences or 1))
    if most is None or length <= most[0] or most[0] <= cache.rows.length:
        return
    asked = generation_config.max_length
    generation_config.max_length = asked - (length - most[0])
    _log.warning(
        "generate: prompt and answer may have %d tokens, but will end after %d: %s",
        asked, generation_config.max_length, most[1],
    )  # fmt: skip


def _ours(
    model: Any, theirs: Cache | None, length: int, options: dict[str, Any], crosses: bool
) -> Cache | None:
    """Our replacement of a cache made by ``generate``; None to keep that one. ``crosses``: the model reads an
    encoder's output, regardless of its config.
    """
    decoder = theirs.self_attention_cache if isinstance(theirs, EncoderDecoderCache) else theirs
    if decoder is not None and (type(decoder) not in (DynamicCache, StaticCache) or decoder.offloading):
        return None
    capacity = max(length, options["capacity"])
    try:
        # Kept: a model's own class that is already one of ours, or an object that is not a KV cache.
        if decoder is None and Trait.OWN_CLASS not in layer_plan(model.config).traits:
            return None
        dtype_of(model.dtype)
        if not isinstance(decoder, StaticCache):
            kind = HFEncoderDecoderCache if crosses else HFCache
            return kind(model.config, **{**options, "capacity": capacity, "grow": True})
        # As in transformers: not smaller than the last one, for which code may be compiled.
        capacity = max(capacity, getattr(model, "_previous_max_cache_length", 0))
        ours = HFStaticCache(model.config, capacity=capacity, backend=options["backend"])
        first = decoder.layers[0]
        if first.is_initialized:  # the first pass, in chunks, is compiled and cannot allocate
            rows, heads, _, dim = first.keys.shape
            ours.early_initialization(rows, heads, dim, first.keys.dtype, first.keys.device)
        return ours
    except ml.NotSupportedError as error:
        _warn(type(model).__name__, str(error))
        return None


def _check_name(name: str, model_kwargs: dict[str, Any]) -> None:
    """Refuse a version of transformers whose ``generate`` passes its cache by an unknown name."""
    others = [other for other, value in model_kwargs.items() if isinstance(value, Cache) and other != name]
    if others and model_kwargs.get(name) is None:
        raise ml.NotSupportedError(
            f"install: transformers {transformers.__version__} gives models a cache as {others[0]!r}, not "
            f"{name!r}; call uninstall(), and pass {others[0]}=HFCache(model.config) yourself"
        )


@functools.cache
def _warn(model: str, reason: str) -> None:
    """Log, once, why a model keeps transformers' own cache."""
    _log.warning("%s keeps transformers' own cache: %s", model, reason)


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepare(model: Any, *args: Any, **options: Any) -> Any:
        return _prepare(original, model, *args, **options)

    return prepare


setattr(GenerationMixin, _NAME, _watched(getattr(GenerationMixin, _NAME)))
