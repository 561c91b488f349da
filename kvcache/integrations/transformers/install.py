"""What ``generate()`` is told before its first pass: where a cache's room ends, and to use ours by itself.

To import this module puts it around the method of ``generate`` that prepares caches. Without ``install`` only
calls that pass one of our caches are any different.
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
"""By what a decoder alone is given what another model's encoder made."""
_log = logging.getLogger("kvcache.transformers")
_installed: Installation | None = None


class Installation(AbstractContextManager["Installation"]):
    """What ``install`` has ``generate`` do; a context manager that ends it."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def __repr__(self) -> str:
        state = "installed" if _installed is self else "uninstalled"
        return f"<kvcache in transformers' generate(), {state}>"

    def uninstall(self) -> None:
        """Let ``generate`` make transformers' own caches again. A second call does nothing."""
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
    """From now on ``generate()`` makes an HFCache where it would make a DynamicCache, and an HFStaticCache
    where it would make a StaticCache (``cache_implementation="static"``).

    A cache is as large as the call asks for, and at least ``capacity`` tokens per row; one that is
    given back to a later call grows between the calls. The other options are HFCache's. Caches that a
    caller passes, offloaded and quantized ones, and models with layers that we have no cache for stay as
    they are; the last is logged. ``uninstall()``, or leaving ``with install():``, undoes it.

    OrderError is raised by a second ``install`` without ``uninstall``.
    """
    global _installed
    if _installed is not None:
        raise OrderError("install: it is already installed; call uninstall() first to change its options")
    options = {"backend": backend, "capacity": capacity, "dtype": dtype, "lookback": lookback}
    _installed = Installation(options)
    return _installed


def uninstall() -> None:
    """Undo ``install``; without one, nothing."""
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
    """What ``generate`` asks before its first pass, when it knows how long the text may become."""
    name, installed = cache_argument(model), _installed
    given = model_kwargs.get(name)
    found = original(model, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
    if installed is not None:
        _check_name(name, model_kwargs)
        if isinstance(given, HFCache) and not given.rows.pool.given_away:
            given.reserve(max_cache_length)
        elif given is None:
            wanted = generation_config.use_cache is not False
            crosses = not _CROSSED.isdisjoint(k for k, x in model_kwargs.items() if x is not None)
            theirs = model_kwargs.get(name)
            ours = _ours(model, theirs, max_cache_length, installed.options, crosses) if wanted else None
            if ours is not None:
                model_kwargs[name] = ours
                if generation_config.is_assistant:
                    ours.activate_past_recording()
    if isinstance(given, RowsCache) and generation_config.num_beams == 1:  # beams share cells
        _end_in_time(given, generation_config, batch_size, max_cache_length)
    return found


def _end_in_time(cache: RowsCache, generation_config: Any, batch: int, length: int) -> None:
    """Let an answer end where the cache's room ends, instead of losing all of it there; the log says so.

    ``length`` tokens of each row may have to be stored. A prompt that does not fit is refused by its pass.
    """
    found = cache.rows.most(batch * (generation_config.num_return_sequences or 1))
    if found is None or length <= found[0] or found[0] <= cache.rows.length:
        return
    asked = generation_config.max_length
    generation_config.max_length = asked - (length - found[0])
    _log.warning(
        "generate: an answer that may be %d tokens long with its prompt ends after %d: %s",
        asked, generation_config.max_length, found[1],
    )  # fmt: skip


def _ours(
    model: Any, theirs: Cache | None, length: int, options: dict[str, Any], crosses: bool
) -> Cache | None:
    """Our cache in place of one that ``generate`` has made; None where that one stays.

    ``crosses``: the model reads an encoder's output, whatever its config says of itself.
    """
    decoder = theirs.self_attention_cache if isinstance(theirs, EncoderDecoderCache) else theirs
    if decoder is not None and (type(decoder) not in (DynamicCache, StaticCache) or decoder.offloading):
        return None
    capacity = max(length, options["capacity"])
    try:
        # Left to the model: a class of its own, for which ours stands in, or what is no cache of keys.
        if decoder is None and Trait.OWN_CLASS not in layer_plan(model.config).traits:
            return None
        dtype_of(model.dtype)
        if not isinstance(decoder, StaticCache):
            kind = HFEncoderDecoderCache if crosses else HFCache
            return kind(model.config, **{**options, "capacity": capacity, "grow": True})
        # As transformers does: not smaller than the last one, which code may be compiled for.
        capacity = max(capacity, getattr(model, "_previous_max_cache_length", 0))
        found = HFStaticCache(model.config, capacity=capacity, backend=options["backend"])
        first = decoder.layers[0]
        if first.is_initialized:  # the first pass, in chunks, is compiled, and cannot allocate
            rows, heads, _, dim = first.keys.shape
            found.early_initialization(rows, heads, dim, first.keys.dtype, first.keys.device)
        return found
    except ml.NotSupportedError as error:
        _warn(type(model).__name__, str(error))
        return None


def _check_name(name: str, model_kwargs: dict[str, Any]) -> None:
    """Refuse a transformers whose ``generate`` keeps its cache where it would not be found."""
    others = [other for other, value in model_kwargs.items() if isinstance(value, Cache) and other != name]
    if others and model_kwargs.get(name) is None:
        raise ml.NotSupportedError(
            f"install: transformers {transformers.__version__} gives models a cache as {others[0]!r}, not "
            f"{name!r}; call uninstall(), and pass {others[0]}=HFCache(model.config) yourself"
        )


@functools.cache
def _warn(model: str, reason: str) -> None:
    """Say once why a model keeps transformers' own cache."""
    _log.warning("%s keeps transformers' own cache: %s", model, reason)


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepare(model: Any, *args: Any, **options: Any) -> Any:
        return _prepare(original, model, *args, **options)

    return prepare


setattr(GenerationMixin, _NAME, _watched(getattr(GenerationMixin, _NAME)))
