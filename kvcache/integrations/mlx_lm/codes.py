"""The codes of quantized layers that mlx-lm has no class for, in files of ``save_prompt_cache``: windows,
chunks, and formats other than its groups. mlx-lm's classes load their dequantized values. A pool of the same
format loads the codes, since quantizing the values again would change them in formats with fitted scales. In
the file, the codes look like one more entry: for each layer the format, the dtype of the activations, and the
parts of K and V. mlx-lm's loader makes only the entries whose classes the file names, and ignores it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx

from kvcache.integrations.mlx_lm.layers import Attention, Layer, entries_in, mlx_caches
from kvcache.integrations.mlx_lm.storage import Codes

__all__ = ["SavedState", "codes_in", "keep_codes"]


class SavedState(tuple[Any, ...]):
    """The state that mlx-lm's class loads; ``codes``, if stored, returns what one of our pools loads."""

    layer: int
    codes: Callable[[], Codes | None]

    @classmethod
    def of(cls, state: Sequence[Any], layer: int, codes: Callable[[], Codes | None]) -> SavedState:
        saved = cls(state)
        saved.layer, saved.codes = layer, codes
        return saved


@functools.cache
def keep_codes() -> None:
    """Wrap the ``tree_flatten`` with which ``save_prompt_cache`` lists states, once."""
    original = mlx_caches.tree_flatten

    @functools.wraps(original)
    def tree_flatten(tree: Any, *arguments: Any, **named: Any) -> Any:
        stored = {} if arguments or named else {state.layer: state.codes() for state in _states(tree)}
        known = {layer: one for layer, one in stored.items() if one is not None}
        if not known:
            return original(tree, *arguments, **named)
        several = [_listed(known.get(layer)) for layer in range(max(known) + 1)]
        return original([*tree, several])

    mlx_caches.tree_flatten = tree_flatten


def _states(tree: Any) -> Iterator[SavedState]:
    if isinstance(tree, SavedState):
        yield tree
    elif isinstance(tree, list | tuple):
        for inner in tree:
            yield from _states(inner)


def _listed(codes: Codes | None) -> list[Any]:
    return [] if codes is None else [codes.format, codes.activations, *codes.parts]


def codes_in(file_name: str, loaded: Sequence[Any], layers: Sequence[Layer]) -> dict[int, Codes]:
    """By layer, the codes in a file of which mlx-lm has ``loaded`` the entries: of all layers whose K and V
    it loaded as values, or of none.
    """
    arrays: Any = mx.load(file_name)
    listed: dict[int, dict[int, Any]] = {}
    for name, array in arrays.items():
        at = name.split(".")
        if len(at) == 3 and at[0] == str(len(loaded)) and at[1].isdecimal() and at[2].isdecimal():
            listed.setdefault(int(at[1]), {})[int(at[2])] = array
    pairs = enumerate(zip(layers, entries_in(loaded), strict=False))
    wanted = {
        i
        for i, (layer, entry) in pairs
        if isinstance(layer, Attention) and layer.used and not isinstance(entry, mlx_caches.QuantizedKVCache)
    }
    if set(listed) != wanted or any(set(parts) != set(range(len(parts))) for parts in listed.values()):
        return {}
    return {i: _read([parts[k] for k in range(len(parts))]) for i, parts in listed.items()}


def _read(listed: Sequence[Any]) -> Codes:
    format_, activations = ("".join(map(chr, text.tolist())) for text in listed[:2])
    return Codes(format_, activations, tuple(listed[2:]))
