"""The device of each layer's K and V: that of the layer, in a model split over several devices."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping
from typing import Any

import torch

import ml
from kvcache import NotSupportedError
from kvcache.integrations.transformers.kinds import Plan

__all__ = ["Places", "device_of", "layer_devices", "opened"]

_log = logging.getLogger("kvcache.transformers")
_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)(?:\.(?:\w*att\w*|mixer|temporal_block))?$")
"""A decoder layer in the names of a device map, or its part with a cache."""
_OTHERS = re.compile(r"(?:^|\.)(?:encoder|vision\w*|visual|audio\w*)\.")


def device_of(model: Any) -> torch.device:
    """The device on which a model computes. Weights offloaded by accelerate are on the meta device between
    passes.
    """
    if model.device.type != "meta":
        return torch.device(model.device)
    for part in model.modules():
        hook = getattr(part, "_hf_hook", None)
        for one in getattr(hook, "hooks", (hook,)):
            device = getattr(one, "execution_device", None)
            if device is not None:
                return torch.device(device)
    raise NotSupportedError(
        f"HFPrefixCache: the weights of {type(model).__name__} are on the meta device: load them"
    )


def opened(backend: ml.Backend | str | None, device: torch.device, plan: Plan) -> ml.Backend:
    """The open backend for HFCache's ``backend``. None: torch on ``device``, and on others of its kind if
    there are any. Caches with the same name, or for the same model, share one backend, so that snapshots can
    be exchanged.
    """
    if backend is not None:
        return _named(backend) if isinstance(backend, str) else backend
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    return _named("torch", str(device)) if count == 1 else _split(device, count, plan)


@functools.cache
def _named(name: str, device: str | None = None) -> ml.Backend:
    return ml.open_backend(name) if device is None else ml.open_backend(name, device=device)


def _split(device: torch.device, count: int, plan: Plan) -> ml.Backend:
    """Place all layers on ``device`` until ``Places`` learns their real devices."""
    known = device, id(plan.config)
    if known not in _of_models:
        names = [str(device), *(f"cuda:{i}" for i in range(count) if i != device.index)]
        count = plan.numbers if plan.indexed or plan.compressed else len(plan.layers)
        layers = [0] * max(1, count, len(plan.crossing))
        _of_models[known] = plan.config, ml.open_backend("torch", devices=names, layers=layers)
    return _of_models[known][1]


_of_models: dict[tuple[torch.device, int], tuple[object, ml.Backend]] = {}
"""By device and id of the config, which is kept alive so that its id stays unique."""


def layer_devices(device_map: Mapping[str, Any]) -> dict[int, torch.device]:
    """The device of each layer, from a model's ``hf_device_map`` (names of modules -> devices).

    Offloaded layers (``"cpu"``, ``"disk"``) are left out: they are computed on another device.
    """
    devices = {}
    for name, device in device_map.items():
        layer = None if _OTHERS.search(name) else _LAYER.search(name)
        if layer is not None and device not in ("cpu", "disk"):
            devices[int(layer[1])] = (
                torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
            )
    return devices


class Places:
    """The devices of layers. A layer without stored tokens is placed on the device of its first keys. With
    ``follows`` False, the backend is the caller's, who has placed its layers.
    """

    def __init__(self, ctx: Any, like: torch.Tensor, follows: bool) -> None:
        self._ctx, self._dtype, self._follows = ctx, like.dtype, follows
        self.contexts: dict[int, ml.Context] = {}
        """By layer, the context of its device, once its keys have arrived."""
        self._likes: dict[int, torch.Tensor] = {}
        self._default = torch.empty((), dtype=like.dtype, device=like.device)
        self.moving: dict[int, torch.device] = {}
        """Layers with stored tokens on a different device from the model's."""

    def like(self, layer: int) -> torch.Tensor:
        """A tensor of one element with the dtype and the device of the layer's keys, as far as known."""
        return self._likes.get(layer, self._default)

    def learn(self, layer: int, device: torch.device, has_data: bool) -> ml.Context:
        """The context on the device of a layer whose first keys are on ``device``."""
        self._likes[layer] = torch.empty((), dtype=self._dtype, device=device)
        if self._follows and device != self._ctx.layer(layer).torch_device:
            if str(device) not in self._names:
                _say(str(device), ", ".join(self._names))
            elif has_data:
                self.moving[layer] = device
            else:
                self._place(layer, device)
        self.contexts[layer] = self._ctx.layer(layer)
        return self.contexts[layer]

    def know(self, devices: Mapping[int, torch.device]) -> None:
        """Place layers that store nothing yet."""
        for layer, device in devices.items():
            if layer not in self.contexts:
                self.learn(layer, device, has_data=False)

    def settle(self) -> None:
        """Place layers in ``moving``, for memory allocated from now on."""
        for layer, device in self.moving.items():
            self._place(layer, device)
            self.contexts[layer] = self._ctx.layer(layer)
        self.moving = {}

    @property
    def _names(self) -> list[str]:
        return [info.name for info in self._ctx.backend.devices]

    def _place(self, layer: int, device: torch.device) -> None:
        self._ctx.backend.place_layer(layer, self._names.index(str(device)))


@functools.cache
def _say(device: str, names: str) -> None:
    """Log the mismatch, once for each device."""
    _log.warning(
        "a model has layers on %s, but its HFCache is on %s, so keys and values are copied in every step; "
        'pass backend=ml.open_backend("torch", devices=[...], layers=[...]) that names both',
        device,
        names,
    )
