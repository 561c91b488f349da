"""Checks of callers' arguments before anything is created; errors say what to pass instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml
from kvcache import InvalidRangeError, ShiftFunction
from kvcache.cache import check_whole
from kvcache.integrations.conversations import check_known, names_of
from kvcache.storage.formats import CacheFormat

__all__ = [
    "THEIRS",
    "ArgumentError",
    "CacheOptions",
    "check_model",
    "check_names",
    "check_options",
    "check_type",
    "signature_of",
]

THEIRS = {"max_cache_len": "capacity", "max_batch_size": "max_sequences", "device": "backend"}
"""Options of transformers' own caches, and our names for them."""


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The options of HFCache; None: as for the first keys."""

    backend: ml.Backend | str | None
    dtype: CacheFormat | None
    max_sequences: int | None
    capacity: int
    lookback: int
    shift: ShiftFunction | None
    grow: bool = False


class ArgumentError(InvalidRangeError, TypeError):
    """An argument of a wrong type, or an unknown one."""


def check_names(op: str, init: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Refuse positional options, and names that are not parameters of ``init`` after the first two."""
    known = names_of(init)
    if args:
        raise ArgumentError(
            f"{op}: {len(args) + 1} positional arguments; pass options by name: {', '.join(known)}"
        )
    check_known(op, options, known, THEIRS, ArgumentError)


def signature_of(init: Callable[..., Any]) -> inspect.Signature:
    """The signature that ``inspect`` and completion show for a class whose ``__new__`` takes anything."""
    whole = inspect.signature(init)
    return whole.replace(parameters=list(whole.parameters.values())[1:])


def check_type(op: str, name: str, value: object, wanted: str, fits: bool) -> None:
    """Raise ArgumentError, naming the ``wanted`` type, unless ``value`` has it."""
    if not fits:
        raise ArgumentError(f"{op}: {name} is a {type(value).__name__}; it must be {wanted}")


def check_options(op: str, options: CacheOptions) -> None:
    """Refuse invalid values of options."""
    backend, shift = options.backend, options.shift
    check_whole(op, "capacity", options.capacity, least=1)
    check_whole(op, "lookback", options.lookback)
    if options.max_sequences is not None:
        check_whole(op, "max_sequences", options.max_sequences, least=1)
    check_type(op, "grow", options.grow, "True or False", isinstance(options.grow, bool))
    wanted = "a function, such as the result of rope_shift(model.config)"
    check_type(op, "shift", shift, wanted, shift is None or callable(shift))
    named = backend is None or isinstance(backend, str)
    check_type(
        op, "backend", backend,
        "None (torch on the model's device), a backend's name, or what ml.open_backend returned",
        named or hasattr(backend, "new_context"),
    )  # fmt: skip
    if isinstance(backend, str):
        known = sorted(ml.plugins.registry().specs())
        if backend not in known:
            raise ArgumentError(
                f"{op}: no backend {backend!r}; known: {', '.join(known)}; None follows the model"
            )


def check_model(op: str, model: object) -> None:
    """Refuse anything but a model with ``generate``."""
    fits = hasattr(model, "config") and callable(getattr(model, "generate", None))
    check_type(op, "model", model, "a model of transformers with generate()", fits)
