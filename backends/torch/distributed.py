"""Ranks joined by torch.distributed: gloo between CPUs, NCCL between CUDA devices."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from backends.torch.convert import TO_TORCH
from backends.torch.tensor import TorchTensor
from ml.base import BaseGroup, SoloGroup
from ml.base.group import check_timeout
from ml.distributed import launched
from ml.dtypes import DType
from ml.errors import GroupError, NotSupportedError

if TYPE_CHECKING:
    from backends.torch.backend import TorchBackend

__all__ = ["TorchGroup", "join"]

_NARROW = (DType.F16, DType.BF16)


def join(backend: TorchBackend, timeout: float) -> BaseGroup:
    """The ranks that torchrun, or whoever sets its variables, has started; else this process alone."""
    seconds = check_timeout(timeout)
    there = dist.is_available() and dist.is_initialized()
    if not there and launched() is None:
        return SoloGroup(backend, seconds)
    if not dist.is_available():
        raise NotSupportedError("distributed: this build of torch has no torch.distributed; install another")
    device = backend.places[0].device
    engine = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    limit = timedelta(seconds=seconds)
    try:
        if there:  # the user has joined them already: a group of ours beside theirs
            native: Any = dist.new_group(backend=engine, timeout=limit)
        else:
            dist.init_process_group(engine, timeout=limit)
            native = dist.group.WORLD
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().split("\n", 1)[0][:200]
        raise GroupError(
            f"distributed: {engine} could not join the ranks within {seconds:g} s ({reason}); start all of "
            "them together, with torchrun's variables, or raise timeout="
        ) from error
    return TorchGroup(backend, native, seconds, owned=not there)


class TorchGroup(BaseGroup):
    def __init__(self, backend: TorchBackend, native: Any, timeout: float, owned: bool) -> None:
        super().__init__(backend, dist.get_rank(native), dist.get_world_size(native), timeout)
        self._native = native
        self._owned = owned

    def _all_reduce(self, ctx: Any, tensor: TorchTensor) -> TorchTensor:
        wide = torch.float32 if tensor.dtype in _NARROW else TO_TORCH[tensor.dtype]
        total = tensor.native.to(wide, copy=True, memory_format=torch.contiguous_format)
        with self._engine("all_reduce"):
            dist.all_reduce(total, group=self._native)
        return TorchTensor.own(ctx, total.to(TO_TORCH[tensor.dtype]), tensor.dtype)

    def _all_gather(self, ctx: Any, tensor: TorchTensor, axis: int) -> TorchTensor:
        mine = tensor.native.contiguous()
        raw = mine.view(-1).view(torch.uint8)  # as bytes: gloo knows fewer dtypes than there are
        parts = [torch.empty_like(raw) for _ in range(self.size)]
        with self._engine("all_gather"):
            dist.all_gather(parts, raw, group=self._native)
        whole = torch.cat([part.view(mine.dtype).view(mine.shape) for part in parts], axis)
        return TorchTensor.own(ctx, whole, tensor.dtype)

    def _barrier(self) -> None:
        with self._engine("barrier"):
            # A sum, since a barrier of torch's own may pick another device.
            backend: Any = self._backend()
            token = torch.zeros(1, device=backend.places[0].device)
            dist.all_reduce(token, group=self._native)
            token.item()

    def _close(self) -> None:
        native, self._native = self._native, None  # its threads end here, and not at the interpreter's end
        dist.destroy_process_group(None if self._owned else native)

    @contextmanager
    def _engine(self, op: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        except (RuntimeError, ValueError) as error:  # dist.DistError is a RuntimeError
            late = time.monotonic() - began > 0.95 * self.timeout
            raise self.broken(op, error, late) from error
