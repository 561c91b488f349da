"""Detects PEFT adapters and changed weights of a model of transformers."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from kvcache import NotSupportedError
from kvcache.integrations.weights import SAMPLES, Marks, WatchedWeights
from kvcache.stores import Part

__all__ = ["Adapters"]

log = logging.getLogger("kvcache.transformers")

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
        owners = [part for _, part in modules if _has_adapters(part)]
        configs = {name: config for part in owners for name, config in part.peft_config.items()}
        self._forget(configs)
        if not configs:  # most models, at each request
            self._weights.look(self._marks("", [*_tensors_of(modules, False)]))
            return self._weights.version
        layers = _layers_of(modules)
        active = [_computing(layer) for layer in layers]
        own = self._look(modules, layers, configs)
        _check(owners, configs, layers, active)
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

    def _forget(self, names: Collection[str]) -> None:
        """Forget the adapters of other names, whose memory the samples keep."""
        for name in [name for name in self._samples if name and name not in names]:
            del self._samples[name]
        self._weights.forget(names)

    def _look(
        self, modules: Sequence[tuple[str, Any]], layers: Sequence[Any], names: Collection[str]
    ) -> dict[str, list[Named]]:
        """Inspect the weights; returns the tensors of each adapter."""
        own: dict[str, list[Named]] = {name: [] for name in names}
        base: list[Named] = []
        by_adapter = {prefix for prefix, part in modules if _is_by_adapter(part, own)}
        for name, tensor in _tensors_of(modules, True):
            path = name.split(".")
            at = next((i for i in range(len(path)) if ".".join((*path[:i], "")) in by_adapter), None)
            if at is not None:
                own[path[at]].append((".".join((*path[:at], "", *path[at + 1 :])), tensor))
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
        self._unread: list[torch.Tensor] = []
        """Tensors without views, which are kept instead, so that no other gets the ``id`` of one."""

    def marks(self, tensors: Sequence[Named]) -> Marks:
        """For each tensor its name, address, version and sampled elements, which are read together for each
        dtype. By the names that they have without adapters.
        """
        parts = [part for named in tensors for part in _parts_of(*named)]
        objects = [_object(tensor) for _, tensor in parts]
        if objects != self._objects:
            order = sorted((_unwrapped(name), i) for i, (name, _) in enumerate(parts))
            views: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
            self._unread = []
            for name, i in order:
                tensor = parts[i][1]
                try:
                    if not tensor.is_meta and tensor.numel():
                        views.setdefault((tensor.device, tensor.dtype), []).append(_few(tensor.detach()))
                except Exception as error:  # sparse or uninitialized, for example
                    self._unread.append(tensor)
                    log.info("%s: writes through .data are not detected: %s", name, error)
            self._named = [(name, *objects[i]) for name, i in order]
            self._objects, self._views = objects, [*views.values()]
        return [*self._named, *((_bytes(torch.cat(group)),) for group in self._views)]


def _parts_of(name: str, tensor: torch.Tensor) -> Iterator[Named]:
    """The tensor, or those inside it if it only wraps them, as quantized weights do."""
    if type(tensor) in (torch.nn.Parameter, torch.Tensor) or not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor
        return
    for part in tensor.__tensor_flatten__()[0]:
        yield from _parts_of(f"{name}.{part}", getattr(tensor, part))


def _few(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a few elements (count,), evenly spaced in memory, or along an axis if others lie between.
    They are in different rows and columns.
    """
    dense = tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
    if not dense.is_contiguous():
        longest = max(range(tensor.ndim), key=tensor.size)
        dense = tensor[tuple(slice(None) if i == longest else n // 2 for i, n in enumerate(tensor.shape))]
    step = max(1, dense.numel() // SAMPLES)
    while any(math.gcd(step, size) > 1 for size in dense.shape):
        step -= 1
    return dense.view(-1)[::step]


def _object(tensor: torch.Tensor) -> tuple[object, ...]:
    if tensor.is_meta:  # offloaded by accelerate, which loads a new object for each pass
        return tensor.shape, tensor.dtype
    try:
        place = tensor.data_ptr()
    except Exception:  # it has no memory of its own
        place = 0
    return id(tensor), place, None if tensor.is_inference() else tensor._version


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


def _has_adapters(part: Any) -> bool:
    """Whether adapters were put into this module, which may be a part of the model."""
    return isinstance(part.__dict__.get("peft_config"), dict) or hasattr(type(part), "peft_config")


def _is_by_adapter(part: Any, names: Collection[str]) -> bool:
    """Whether a module is a dict of a layer's tensors or modules by adapter."""
    keys: set[str] = {*part.keys()} if type(part).__name__.endswith("Dict") else set()
    return bool(keys) and keys.issubset(names)


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


def _check(
    owners: Sequence[Any],
    configs: Mapping[str, Any],
    layers: Sequence[Any],
    active: Sequence[Sequence[tuple[str, Any]]],
) -> None:
    """Refuse adapters whose keys and values depend on more than earlier tokens, or cannot be identified."""
    checked = [configs.get(name) for name in {name for each in active for name, _ in each}]
    for owner in owners:
        own: Any = getattr(owner, "active_peft_config", None)
        if own is not None and (any(active) or not layers or own.is_prompt_learning):
            checked.append(own)
    for config in checked:
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
