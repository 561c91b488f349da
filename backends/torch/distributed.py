"""Ranks joined by torch.distributed: gloo between CPUs, NCCL between CUDA devices."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from backends.torch.convert import TO_TORCH
from backends.torch.tensor import TorchTensor
from ml.base import BaseBackend, BaseGroup, SoloGroup
from ml.distributed import check_timeout, launched
from ml.dtypes import DType
from ml.errors import GroupError, NotSupportedError

_NARROW = (DType.F16, DType.BF16)
_LOOPBACK = "127.0.0.1"
POLL = 1e-4
"""Seconds between checks of NCCL's operations."""
_joined = itertools.count()
"""The number of times that this process has joined, equal on all ranks."""


def join(backend: BaseBackend, device: torch.device, timeout: float) -> BaseGroup:
    """The group of ranks started by torchrun, or with its variables; without them, this process alone."""
    seconds = check_timeout(timeout)
    there = dist.is_available() and dist.is_initialized()
    if not there and launched() is None:
        return SoloGroup(backend, seconds)
    if not dist.is_available():
        raise NotSupportedError(
            "distributed: this build of torch has no torch.distributed; install another build"
        )
    engine = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    began = time.monotonic()
    limit = timedelta(seconds=seconds)
    if not there and engine == "nccl":  # torch's watchdog would abort the process when the group raises
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    try:
        if there:  # already joined by the user: create our own group besides theirs
            native: Any = dist.new_group(backend=engine, timeout=limit)
        else:
            _keep_to_loopback()
            rank, size = launched() or (0, 1)
            store = _rendezvous(rank, size, began, seconds)
            dist.init_process_group(engine, store=store, rank=rank, world_size=size, timeout=limit)
            native = dist.group.WORLD
    except (RuntimeError, ValueError, OSError) as error:
        if isinstance(error, GroupError):
            raise
        late = time.monotonic() - began > 0.95 * seconds
        raise _not_joined(engine, seconds, str(error).strip().split("\n", 1)[0][:200], late) from error
    return TorchGroup(backend, device, native, seconds, owned=not there)


def _keep_to_loopback() -> None:
    """If rank 0 is on the loopback interface, use it for gloo, which otherwise uses the host name's
    interface.
    """
    names = {name for _, name in socket.if_nameindex()} if hasattr(socket, "if_nameindex") else set()
    if os.environ.get("MASTER_ADDR") == _LOOPBACK and (interfaces := names & {"lo", "lo0"}):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", min(interfaces))


def _rendezvous(rank: int, size: int, began: float, seconds: float) -> Any:
    """The store through which the ranks find each other, once all are present. torch's own wait has a
    resolution of seconds, and is longer while rank 0 is absent.
    """
    host, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not (host and port.isdecimal() and int(port) < 1 << 16):
        raise GroupError(
            f"distributed: MASTER_ADDR={host!r} and MASTER_PORT={port!r} do not give the address of "
            "rank 0; start "
            "the ranks with torchrun, or set both"
        )
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    until = began + seconds
    count = next(_joined)
    here = [f"ml/{count}/{other}" for other in range(size)]
    while True:
        if not serves:
            _reach(host, int(port), rank, until, seconds)
        try:
            return _meet(host, int(port), here, rank, serves, until, seconds)
        except dist.DistNetworkError:  # it may have been the store of a group that rank 0 was leaving
            if serves or time.monotonic() >= until:
                raise


def _meet(
    host: str, port: int, here: list[str], rank: int, serves: bool, until: float, seconds: float
) -> Any:
    """The store at this address, once all ranks have registered in it."""
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        len(here),
        serves,
        timedelta(seconds=_left(until)),
        wait_for_workers=False,
        multi_tenant=True,
    )
    store.set(here[rank], "here")
    try:
        store.wait(here, timedelta(seconds=_left(until)))
    except dist.DistStoreError as error:
        missing = [str(other) for other, key in enumerate(here) if not store.check([key])]
        reason = f"rank {', '.join(missing)} of {len(here)} did not connect" if missing else str(error)
        raise _not_joined(f"rank {rank}", seconds, reason, late=True) from error
    return store


def _reach(host: str, port: int, rank: int, until: float, seconds: float) -> None:
    """Return when the address accepts connections. Raises GroupError, which names ``seconds``, if it does not
    by ``until``.
    """
    while True:
        try:
            socket.create_connection((host, port), timeout=_left(until)).close()
        except OSError as error:
            if time.monotonic() >= until:
                reason = f"rank 0 does not answer at {host}:{port}: {error}"
                raise _not_joined(f"rank {rank}", seconds, reason, late=True) from error
            time.sleep(min(0.02, _left(until)))
        else:
            return


def _left(until: float) -> float:
    """The remaining seconds, always slightly above 0."""
    return max(0.01, until - time.monotonic())


def _not_joined(who: str, seconds: float, reason: str, late: bool) -> GroupError:
    error = GroupError(
        f"distributed: {who} could not join the ranks within {seconds:.3g} s ({reason}); start all of them "
        "together, with torchrun's variables, or raise timeout="
    )
    error.late = late
    return error


class TorchGroup(BaseGroup):
    """gloo's operations have their own timeout; NCCL's are queued, and ``settle`` watches them."""

    def __init__(
        self, backend: BaseBackend, device: torch.device, native: Any, timeout: float, owned: bool
    ) -> None:
        super().__init__(backend, dist.get_rank(native), dist.get_world_size(native), timeout)
        self._device = device
        self._native = native
        self._owned = owned
        self._queued: deque[Any] = deque()
        """An event after each of NCCL's operations that may not have run."""

    def _all_reduce(self, ctx: Any, tensor: TorchTensor) -> TorchTensor:
        wide = torch.float32 if tensor.dtype in _NARROW else TO_TORCH[tensor.dtype]
        total = tensor.native.to(wide, copy=True, memory_format=torch.contiguous_format)
        with self._engine("all_reduce"):
            dist.all_reduce(total, group=self._native)
        return TorchTensor.own(ctx, total.to(TO_TORCH[tensor.dtype]), tensor.dtype)

    def _all_gather(self, ctx: Any, tensor: TorchTensor, axis: int) -> TorchTensor:
        mine = tensor.native.contiguous()
        raw = mine.view(-1).view(torch.uint8)  # as bytes: gloo supports only some dtypes
        parts = [torch.empty_like(raw) for _ in range(self.size)]
        with self._engine("all_gather"):
            dist.all_gather(parts, raw, group=self._native)
        whole = torch.cat([part.view(mine.dtype).view(mine.shape) for part in parts], axis)
        return TorchTensor.own(ctx, whole, tensor.dtype)

    def _barrier(self) -> None:
        with self._engine("barrier"):
            # A sum, since torch's barrier may choose another device.
            token = torch.zeros(1, device=self._device)
            dist.all_reduce(token, group=self._native)
        self.settle("barrier")
        with self._engine("barrier"):
            token.item()

    def settle(self, op: str) -> None:
        """Return when NCCL's operations have run, so that reading a result never waits forever. Raises
        GroupError, and aborts the group, if no operation ends for ``timeout`` seconds.
        """
        began = time.monotonic()
        while self._queued:
            try:
                ended = self._queued[0].query()
            except RuntimeError as error:
                self._abort()
                raise self.broken(op, error, late=False) from error
            if ended:
                self._queued.popleft()
                began = time.monotonic()
            elif time.monotonic() - began > self.timeout:
                self._abort()
                raise self.broken(op, "no NCCL operation has finished", late=True)
            else:
                time.sleep(POLL)

    def _abort(self) -> None:
        """End NCCL's kernels, which wait for other ranks and would block the device."""
        self._queued.clear()
        native, self._native = self._native, None
        with suppress(RuntimeError):
            native.abort()

    def _abandon(self) -> None:
        if self._device.type == "cuda":
            self._abort()
        else:
            self._close()

    def _close(self) -> None:
        native, self._native = self._native, None  # its threads end here, not at interpreter exit
        if native is not None:
            dist.destroy_process_group(None if self._owned else native)

    @contextmanager
    def _engine(self, op: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
            if self._device.type == "cuda":
                event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream(self._device))
                self._queued.append(event)
        except (RuntimeError, ValueError) as error:  # dist.DistError is a RuntimeError
            late = time.monotonic() - began > 0.95 * self.timeout
            raise self.broken(op, error, late) from error
