"""Gradients do not flow through a cache: who asks for them is told, instead of given some of them."""

from __future__ import annotations

from typing import Any

import torch

from kvcache import NotSupportedError
from kvcache.integrations.transformers.passes import Pair

__all__ = ["is_recorded", "without_gradients"]


def is_recorded(key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether gradients of new keys and values are being recorded."""
    return torch.is_grad_enabled() and (key.requires_grad or value.requires_grad)


def without_gradients(found: Pair, key: torch.Tensor, value: torch.Tensor) -> Pair:
    """``found``, whose ``backward`` raises NotSupportedError where gradients of ``key`` are recorded."""
    if not is_recorded(key, value):
        return found
    apply: Any = _Stored.apply
    keys, values = (apply(x, key, value) for x in found)
    return keys, values


class _Stored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, found: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return found.view_as(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotSupportedError("HFCache: gradients do not flow through a cache; train with use_cache=False")
