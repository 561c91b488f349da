"""Pages between CUDA devices and page-locked host memory, on separate streams."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from backends.page_streams import RUN, PageStreams, StreamTransfer, runs
from backends.torch.convert import TO_TORCH, takes, translated, write
from backends.torch.tensor import TorchTensor
from ml.dtypes import DType
from ml.errors import DeviceError

SHORT_RUN = 16 << 10
"""Bytes."""


class _Queue:
    """See ``backends.page_streams.CopyQueue``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def after_compute(self, op: str) -> Iterator[None]:
        with self._translated(op):
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                yield

    def mark(self) -> Any:
        # Blocking: a waiting thread yields the processor.
        event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def reached(self, event: Any) -> bool:
        with self._translated("page"):
            return bool(event.query())

    def wait(self, event: Any) -> None:
        with self._translated("page"):
            event.synchronize()

    def join(self, event: Any) -> None:
        with self._translated("page"):
            torch.cuda.current_stream(self._device).wait_event(event)

    @contextlib.contextmanager
    def _translated(self, op: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            raise translated(op, error, str(self._device)) from error


class TorchPages:
    """The pages of one backend with a CUDA device."""

    def __init__(self) -> None:
        self._streams = PageStreams(_Queue)
        self.close = self._streams.close

    def pinned_memory(self, nbytes: int) -> np.ndarray:
        host: np.ndarray = _pinned((nbytes,), DType.U8).numpy()
        return host

    def page_out(self, tensors: Sequence[TorchTensor]) -> tuple[list[np.ndarray], StreamTransfer] | None:
        """None if a tensor is not on a CUDA device."""
        if not all(map(_is_far, tensors)):
            return None
        hosts = [_pinned(tensor.shape, tensor.dtype) for tensor in tensors]
        pairs = list(zip(hosts, [tensor.native for tensor in tensors], strict=True))
        copies = [(native.device, partial(write, host, host.copy_, native, True)) for host, native in pairs]
        arrays = [_array(host, tensor.dtype) for host, tensor in zip(hosts, tensors, strict=True)]
        return arrays, self._streams.begin("page_out", copies, pairs)

    def page_in(self, arrays: Sequence[np.ndarray], tensors: Sequence[TorchTensor]) -> StreamTransfer | None:
        """None if a tensor is not on a CUDA device."""
        if not all(map(_is_far, tensors)):
            return None
        pairs = [(tensor.native, _source(array)) for array, tensor in zip(arrays, tensors, strict=True)]
        copies = [(native.device, copy) for native, source in pairs for copy in _pieces(native, source)]
        return self._streams.begin("page_in", copies, pairs)


def _is_far(tensor: TorchTensor) -> bool:
    return tensor.native.is_cuda


def _pinned(shape: Sequence[int], dtype: DType) -> torch.Tensor:
    """Page-locked memory from torch's pool, which allocates only if no block of the size is free."""
    try:
        with torch.inference_mode(False):
            return torch.empty(tuple(shape), dtype=TO_TORCH[dtype], pin_memory=True)
    except (RuntimeError, MemoryError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise DeviceError(
            f"page: no page-locked host memory for {tuple(shape)} of {dtype!r}: {reason}; raise the limit of "
            "locked memory (ulimit -l), or give the HostTier less"
        ) from error


def _array(host: torch.Tensor, dtype: DType) -> np.ndarray:
    if dtype is DType.BF16:
        return host.view(torch.int16).numpy().view(dtype.numpy)
    return host.numpy()


def _source(array: np.ndarray) -> torch.Tensor:
    """The array's own memory if torch accepts it. Only page-locked memory is copied at the speed of the bus;
    a copy would not be page-locked.
    """
    dtype = DType.from_numpy(array.dtype)
    whole = array if takes(array) else np.array(array, order="C")
    bits = whole.view(np.int16) if dtype is DType.BF16 else whole
    return torch.from_numpy(bits).view(TO_TORCH[dtype])


def _pieces(target: torch.Tensor, source: torch.Tensor) -> Iterator[Callable[[], None]]:
    """Copies of one run each, directly to their destination; else one copy, which torch makes in two steps.
    torch would first gather a source with gaps in memory that is not page-locked, so shorter runs are allowed
    there.
    """
    least = RUN if source.is_contiguous() else SHORT_RUN
    both = [runs(tuple(x.shape), x.stride(), x.element_size(), least) for x in (target, source)]
    outer = 0 if None in both else max(axes for axes in both if axes is not None)
    for where in product(*map(range, target.shape[:outer])):
        piece = target[where]
        yield partial(write, piece, piece.copy_, source[where], True)
