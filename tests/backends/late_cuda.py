"""CUDA's streams and events as far as pages need them, on the CPU: what a stream was given runs late.

Compute runs at once, as if its stream were always empty; ``given`` gives it work that runs late too. Copies
wait in their streams until somebody waits for them, or a draw lets them go: then in any order that events
leave open. What this does not show is whether CUDA's own streams and allocators do as they are said to.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode


class Event:
    def __init__(self, blocking: bool = False) -> None:
        self.device: Any = None
        self.reached = False

    def record(self, stream: Stream) -> None:
        self.reached = stream is CUDA.compute and not stream.queue
        if not self.reached:
            stream.queue.append(self)

    def query(self) -> bool:
        CUDA.draw()
        return self.reached

    def synchronize(self) -> None:
        while not self.reached:
            CUDA.step()


class Stream:
    def __init__(self, device: Any = None) -> None:
        self.queue: deque[Event | tuple[Event] | Callable[[], object]] = deque()
        """An event to reach, one to wait for, or work."""
        CUDA.streams.append(self)

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def wait_event(self, event: Event) -> None:
        if self is CUDA.compute and not self.queue:
            event.synchronize()  # what it is given from now on runs at once
        else:
            self.queue.append((event,))

    def step(self) -> bool:
        """Run the first of the queue; False where there is none, or it waits."""
        if not self.queue:
            return False
        first = self.queue[0]
        if isinstance(first, tuple) and not first[0].reached:
            return False
        self.queue.popleft()
        if isinstance(first, Event):
            first.reached = True
        elif not isinstance(first, tuple):
            with CUDA.on(None):
                first()
        return True


class _Cuda:
    """The device: its streams, and which of them is current."""

    def __init__(self) -> None:
        self.reset(0)

    def reset(self, seed: int) -> None:
        self.streams: list[Stream] = []
        self.random = random.Random(seed)
        self.late = True
        self.compute = self.current = Stream.__new__(Stream)
        self.compute.queue = deque()
        self.streams.append(self.compute)

    @contextlib.contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """``stream`` None: what is called runs at once."""
        before, self.current = self.current, stream or self.compute
        late, self.late = self.late, stream is not None
        try:
            yield
        finally:
            self.current, self.late = before, late

    def step(self) -> None:
        """Let one stream go on, any of those that can."""
        for stream in self.random.sample(self.streams, len(self.streams)):
            if stream.step():
                return
        raise AssertionError("all streams wait for one another, or for what nobody recorded")

    def draw(self) -> None:
        for _ in range(self.random.randrange(3)):
            with contextlib.suppress(AssertionError):
                self.step()

    def given(self, work: Callable[[], object]) -> None:
        """Work of the compute stream that runs late."""
        self.compute.queue.append(work)


CUDA = _Cuda()


class LateCopies(TorchFunctionMode):
    """Copies on any stream but that of compute wait in it; page-locked memory is memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        options.pop("pin_memory", None)
        if func is torch.Tensor.copy_ and CUDA.late and CUDA.current is not CUDA.compute:
            CUDA.current.queue.append(lambda: func(*args, **options))
            return args[0]
        return func(*args, **options)


@contextlib.contextmanager
def late_cuda(monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> Iterator[_Cuda]:
    """``backends.torch.transfer`` pages tensors of the CPU as if they lay on a device."""
    from backends.torch import transfer

    CUDA.reset(seed)
    for name, stand_in in {"Stream": Stream, "Event": Event, "stream": CUDA.on}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: CUDA.current)
    monkeypatch.setattr(transfer, "_is_far", lambda tensor: True)
    with LateCopies():
        yield CUDA
