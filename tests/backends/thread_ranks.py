"""Ranks that are threads of one process, over any backend: quick enough for many random runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

import ml

SECONDS = 60.0


class ThreadGroup:
    """One rank's end of a group of threads; what is exchanged is checked to be of one shape and dtype."""

    timeout = SECONDS
    closed = False

    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        self.rank, self.size = rank, size
        self._meeting = meeting
        self.exchanges = 0

    def all_reduce(self, ctx: Any, tensor: ml.Tensor) -> ml.Tensor:
        return ctx.from_numpy(
            np.sum(self._all("sum", tensor), axis=0, dtype=tensor.dtype.numpy), tensor.dtype
        )

    def all_gather(self, ctx: Any, tensor: ml.Tensor, axis: int = 0) -> ml.Tensor:
        return ctx.from_numpy(np.concatenate(self._all("gather", tensor), axis), tensor.dtype)

    def barrier(self) -> None:
        self._meeting.exchange(self.rank, ("barrier",), None)

    def abandon(self, op: str, error: BaseException) -> None:
        self._meeting.leave()

    def close(self) -> None:
        return

    def _all(self, op: str, tensor: ml.Tensor) -> list[np.ndarray]:
        self.exchanges += 1
        return self._meeting.exchange(self.rank, (op, tensor.shape, tensor.dtype), tensor.to_numpy())


class Meeting:
    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=SECONDS)
        self._given: list[Any] = [None] * size
        self._left = False

    def exchange(self, rank: int, kind: tuple[Any, ...], value: Any) -> list[Any]:
        self._given[rank] = (kind, value)
        try:
            self._barrier.wait()
            given = list(self._given)
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise ml.GroupError("another rank has ended" if self._left else "no other rank came") from None
        kinds = [kind for kind, _ in given]
        if any(other != kinds[0] for other in kinds):
            raise ml.GroupError(f"the ranks are in different exchanges: {kinds}")
        return [value for _, value in given]

    def leave(self) -> None:
        self._left = True
        self._barrier.abort()


def run_ranks(size: int, work: Callable[[ThreadGroup], Any]) -> list[Any]:
    """What ``work`` returns on each rank; raises what the first one that failed by itself raised."""
    meeting = Meeting(size)
    found: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            found[rank] = work(ThreadGroup(rank, size, meeting))
        except BaseException as error:
            errors.append(error)
            meeting.leave()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
    if errors:
        raise errors[0]
    return found
