"""Checks of callers' arguments before anything is created; errors say what to pass instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml
from kvcache import InvalidRangeError, ShiftFunction
from kvcache.cache import check_whole
from kvcache.integrations.conversations import check_known
from kvcache.integrations.transformers.bridge import HFDType, stored_dtype

__all__ = [
    "THEIRS",
    "ArgumentError",
    "CacheOptions",
    "check_model",
    "check_names",
    "check_options",
    "check_type",
]

THEIRS = {"max_cache_len": "capacity", "max_batch_size": "max_sequences", "device": "backend"}
"""Options of transformers' own caches, and our names for them."""


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The options of an HFCache.

    ``backend`` stores K and V: an open one, a name, or None for torch on the model's device.
    ``max_sequences`` is the number of rows of the batch and of all forks (None: the rows of the first batch),
    ``capacity`` the tokens of each; together they share ``max_sequences * capacity`` cells. ``dtype`` is the
    storage format of K and V: an ml.DType, a torch.dtype, a storage format or its name, or a pair of these
    (None: the dtype of the first keys). Sliding windows keep ``lookback`` more tokens than they show, so that
    ``crop`` can remove that many. ``shift`` re-encodes keys for ``remove`` from the middle: see
    ``rope_shift``. With ``grow``, the capacity doubles if a batch or a snapshot does not fit, which copies
    the content, instead of raising CacheFullError. With ``interval``, what windows and recurrent states hold
    is kept where a pass ends, at least that many tokens apart, for ``rewind``; that takes memory.
    """

    backend: ml.Backend | str | None = None
    max_sequences: int | None = None
    capacity: int = 4096
    dtype: HFDType | None = None
    lookback: int = 64
    shift: ShiftFunction | None = None
    grow: bool = False
    interval: int | None = None


class ArgumentError(InvalidRangeError, TypeError):
    """An argument of a wrong type, or an unknown one."""


def check_names(op: str, known: Sequence[str], args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Refuse positional options, and names that are not ``known``."""
    if args:
        raise ArgumentError(
            f"{op}: {len(args) + 1} positional arguments; pass options by name: {', '.join(known)}"
        )
    check_known(op, options, known, THEIRS, ArgumentError)


def check_type(op: str, name: str, value: object, wanted: str, fits: bool) -> None:
    """Raise ArgumentError, naming the ``wanted`` type, unless ``value`` has it."""
    if not fits:
        raise ArgumentError(f"{op}: {name} is a {type(value).__name__}; it must be {wanted}")


def check_options(op: str, options: CacheOptions) -> None:
    """Refuse invalid values of options; sizes become ints."""
    backend, shift = options.backend, options.shift
    stored_dtype(options.dtype)
    for name, least in (("capacity", 1), ("lookback", 0), ("max_sequences", 1), ("interval", 1)):
        if (value := getattr(options, name)) is not None or name in ("capacity", "lookback"):
            object.__setattr__(options, name, check_whole(op, name, value, least))
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
        known = sorted(ml.backend_specs())
        if backend not in known:
            raise ArgumentError(
                f"{op}: no backend {backend!r}; known: {', '.join(known)}; None follows the model"
            )


def check_model(op: str, model: object) -> None:
    """Refuse anything but a model with ``generate``."""
    fits = hasattr(model, "config") and callable(getattr(model, "generate", None))
    check_type(op, "model", model, "a model of transformers with generate()", fits)
