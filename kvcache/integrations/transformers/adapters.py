"""Detects PEFT adapters and changed weights of a model of transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kvcache import NotSupportedError
from kvcache.integrations.weights import SAMPLES, Marks, WatchedWeights
from kvcache.stores import Part

__all__ = ["Adapters"]

Named = tuple[str, torch.Tensor]
_TUNERS = {
    "ADAPTION_PROMPT": "adds prompts inside the layers, which do not expose whether they are disabled",
    "LILY": "weighs its experts by all tokens of a pass",
    "SHADOW": "has a second network, whose keys and values are not cached",
    "XLORA": "evaluates each pass twice",
}
"""PEFT types whose keys and values cannot be shared, and the reason."""
_WRAPPED = {"base_layer", "original_module"}
"""The attributes in which PEFT stores the wrapped layer."""


class Adapters:
    """Identifies what K and V of ``model`` depend on besides the tokens and its current weights. Writes
    through ``.data``, which neither replace a tensor nor change its version, are detected if they change one
    of a few sampled elements, as writes of whole tensors do.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._weights = WatchedWeights()
        self._samples: dict[str, Samples] = {}
        """By adapter; "": of the weights outside adapters."""
        with contextlib.suppress(NotSupportedError):  # of adapters; the weights have been inspected
            self.variant()

    def variant(self) -> Part:
        """The variant for new conversations; None: the original weights without adapters. Raises
        NotSupportedError for adapters whose keys and values cannot be shared.
        """
        modules = _modules_of(self._model)
        if not getattr(self._model, "peft_config", None):  # most models, at each request
            self._weights.look(self._marks("", [*_tensors_of(modules, False)]))
            return self._weights.version
        layers = _layers_of(modules)
        active = [_computing(layer) for layer in layers]
        own = self._look(modules, layers)
        _check(self._model, layers, active)
        digests = {name: self._digest(name, own) for name in {name for each in active for name, _ in each}}
        parts: list[Part] = [[(digests[name], scale) for name, scale in each] for each in active]
        if not any(active):
            return self._weights.version
        return self._weights.version, parts if any(one != parts[0] for one in parts) else parts[:1]

    def are(self, variant: Part) -> bool:
        """Whether the current variant is this one."""
        try:
            return self.variant() == variant
        except NotSupportedError:
            return False

    def _look(self, modules: Sequence[tuple[str, Any]], layers: Sequence[Any]) -> dict[str, list[Named]]:
        """Inspect the weights; returns the tensors of each adapter."""
        own: dict[str, list[Named]] = {name: [] for name in self._model.peft_config}
        base: list[Named] = []
        for name, tensor in _tensors_of(modules, True):
            path = name.split(".")
            adapter = next((part for part in path if part in own), None)
            if adapter is not None:
                own[adapter].append((".".join("" if part == adapter else part for part in path), tensor))
            elif isinstance(tensor, torch.nn.Parameter):
                base.append((name, tensor))
        # Merging an adapter and unmerging it both change the weights, with rounding: other writes in between
        # cannot be distinguished.
        merged = [tuple(getattr(layer, "merged_adapters", ())) for layer in layers]
        self._weights.look([*self._marks("", base), *filter(None, merged)])
        return own

    def _digest(self, name: str, own: dict[str, list[Named]]) -> str:
        tensors = own.get(name, [])
        return self._weights.digest(name, self._marks(name, tensors), lambda: map(_content, tensors))

    def _marks(self, whose: str, tensors: Sequence[Named]) -> Marks:
        return self._samples.setdefault(whose, Samples()).marks(tensors)


class Samples:
    """Views of a few elements of each tensor, renewed when the tensors are replaced."""

    def __init__(self) -> None:
        self._objects: Marks = ()
        self._named: Marks = ()
        self._views: list[list[torch.Tensor]] = []

    def marks(self, tensors: Sequence[Named]) -> Marks:
        """For each tensor its name, address, version and sampled elements, which are read together for each
        dtype. By the names that they have without adapters.
        """
        objects = [_object(tensor) for _, tensor in tensors]
        if objects != self._objects:
            order = sorted((_unwrapped(name), i) for i, (name, _) in enumerate(tensors))
            views: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
            for _, i in order:
                tensor = tensors[i][1]
                if tensor.numel() and not tensor.is_meta:
                    views.setdefault((tensor.device, tensor.dtype), []).append(_few(tensor.detach()))
            self._named = [(name, *objects[i]) for name, i in order]
            self._objects, self._views = objects, [*views.values()]
        return [*self._named, *((_bytes(torch.cat(group)),) for group in self._views)]


def _few(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a few elements (count,), evenly spaced in memory, or along an axis if others lie between."""
    dense = tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
    if not dense.is_contiguous():
        longest = max(range(tensor.ndim), key=tensor.size)
        dense = tensor[tuple(slice(None) if i == longest else n // 2 for i, n in enumerate(tensor.shape))]
    return dense.view(-1)[:: -(-dense.numel() // SAMPLES)]


def _object(tensor: torch.Tensor) -> tuple[object, ...]:
    if tensor.is_meta:  # offloaded by accelerate, which loads a new object for each pass
        return tensor.shape, tensor.dtype
    return id(tensor), tensor.data_ptr(), None if tensor.is_inference() else tensor._version


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def _modules_of(model: Any) -> list[tuple[str, Any]]:
    """All modules, each with the prefix of its tensors' names."""
    modules = [("", model)] if isinstance(model, torch.nn.Module) else []
    seen = {id(model)}
    for name, module in modules:  # the list grows during the loop
        for key, child in module._modules.items():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                modules.append((f"{name}{key}.", child))
    return modules


def _layers_of(modules: Sequence[tuple[str, Any]]) -> list[Any]:
    """The layers that have adapters."""
    # PEFT's layers have a property; models have methods of the same name.
    return [part for _, part in modules if isinstance(getattr(part, "disable_adapters", None), bool)]


def _tensors_of(modules: Sequence[tuple[str, Any]], buffers: bool) -> Iterator[Named]:
    for name, module in modules:
        for own in (module._parameters, module._buffers) if buffers else (module._parameters,):
            yield from ((name + key, tensor) for key, tensor in own.items() if tensor is not None)


def _computing(layer: Any) -> list[tuple[str, float | None]]:
    """The active adapters of a layer and their scales."""
    if layer.disable_adapters:
        return []
    names = layer.merged_adapters if getattr(layer, "merged", False) else layer.active_adapters
    scaling = getattr(layer, "scaling", None)  # a number for attention that an adapter has saved whole
    scales = {name: scaling.get(name) if isinstance(scaling, dict) else None for name in names}
    return [(name, None if scale is None else float(scale)) for name, scale in scales.items()]


def _check(model: Any, layers: Sequence[Any], active: Sequence[Sequence[tuple[str, Any]]]) -> None:
    """Refuse adapters whose keys and values depend on more than earlier tokens, or cannot be identified."""
    configs = [model.peft_config.get(name) for name in {name for each in active for name, _ in each}]
    own: Any = getattr(model, "active_peft_config", None)
    if own is not None and (any(active) or not layers or own.is_prompt_learning):
        configs.append(own)
    for config in configs:
        if config is not None:
            _check_adapter(config)


def _check_adapter(config: Any) -> None:
    kind = getattr(config.peft_type, "value", config.peft_type)
    why = _TUNERS.get(kind)
    if config.is_prompt_learning:
        why = "puts virtual tokens before the prompt, which are part of no prefix"
    elif getattr(config, "alora_invocation_tokens", None):
        why = "(alora_invocation_tokens) starts at the last invocation, which later tokens move"
    if why is not None:
        raise NotSupportedError(f"begin: {kind} {why}; call the model without HFPrefixCache")


def _content(named: Named) -> tuple[str, bytes]:
    name, tensor = named
    return f"{name} {tensor.dtype} {tuple(tensor.shape)}", _bytes(tensor.detach().reshape(-1))


def _bytes(flat: torch.Tensor) -> bytes:
    return flat.cpu().contiguous().view(torch.uint8).numpy().tobytes() if flat.numel() else b""
