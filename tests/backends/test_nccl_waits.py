"""A group on CUDA whose ranks are lost: NCCL and its events are stood in for, the waiting is ours.

What this does not show is what NCCL itself does: none of it has run on a device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

import ml
from ml import DType

torch = pytest.importorskip("torch")

from backends.torch import distributed  # noqa: E402
from backends.torch.backend import TorchBackend  # noqa: E402


class Native:
    """A process group."""

    aborted = 0

    def abort(self) -> None:
        self.aborted += 1


class Ranks:
    """Rank 0 of 2 on CUDA. ``ended``: how many operations have run on the device, or what it fails with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, timeout: float) -> None:
        self.ended: int | RuntimeError = 0
        self.destroyed: list[Any] = []
        ranks = self

        class Event:
            count = 0

            def record(self, stream: Any) -> None:
                Event.count += 1
                self.number = Event.count

            def query(self) -> bool:
                if isinstance(ranks.ended, RuntimeError):
                    raise ranks.ended
                return self.number <= ranks.ended

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
        zeros = torch.zeros
        monkeypatch.setattr(
            torch, "zeros", lambda *args, **options: zeros(*args, **{**options, "device": "cpu"})
        )
        for name, value in {
            "get_rank": lambda group: 0,
            "get_world_size": lambda group: 2,
            "all_reduce": lambda tensor, group: tensor.mul_(2),
            "all_gather": lambda parts, raw, group: [part.copy_(raw) for part in parts],
            "destroy_process_group": self.destroyed.append,
        }.items():
            monkeypatch.setattr(distributed.dist, name, value)
        self.native = Native()
        self.backend = TorchBackend(device="cpu")
        self.group = distributed.TorchGroup(
            self.backend, torch.device("cuda", 0), self.native, timeout, owned=True
        )
        self.backend.group, self.backend.settle = self.group, self.group.settle
        self.ctx = self.backend.new_context()


def test_results_are_read_when_their_operations_have_run(monkeypatch: pytest.MonkeyPatch) -> None:
    r = Ranks(monkeypatch, 60)
    total = r.group.all_reduce(r.ctx, r.ctx.full((3,), 4, DType.F32))
    whole = r.group.all_gather(r.ctx, total)
    looks: list[float] = []
    monkeypatch.setattr(distributed.time, "sleep", lambda seconds: looks.append(seconds) or _run(r, 2))
    assert whole.to_numpy().tolist() == [8] * 6
    assert looks == [distributed.POLL], "the host asked for no operation before"
    assert total.to_numpy().tolist() == [8] * 3
    r.backend.close()
    assert (r.destroyed, r.native.aborted) == ([None], 0)


def _run(r: Ranks, count: int) -> None:
    r.ended = count


@pytest.mark.parametrize(
    ("read", "op"),
    [
        (lambda r, x: x.to_numpy(), "to_numpy"),
        (lambda r, x: r.ctx.zeros((2,), DType.F32).to_numpy(), "to_numpy"),
        (lambda r, x: r.group.barrier(), "barrier"),
    ],
    ids=["what was reduced", "anything else", "a barrier"],
)
def test_a_rank_that_does_not_come_ends_the_wait_in_time(
    monkeypatch: pytest.MonkeyPatch, read: Callable[[Ranks, Any], None], op: str
) -> None:
    r = Ranks(monkeypatch, 0.05)
    x = r.group.all_reduce(r.ctx, r.ctx.full((3,), 4, DType.F32))
    with pytest.raises(ml.GroupError, match=f"^{op}: rank 0 of 2 has waited 0.05 s") as caught:
        read(r, x)
    assert caught.value.late
    assert r.native.aborted == 1, "its kernels would keep the device"
    for again in (lambda: r.group.all_reduce(r.ctx, x), r.group.barrier):
        with pytest.raises(ml.GroupError):
            again()
    assert x.to_numpy().shape == (3,)
    r.backend.close()
    assert r.destroyed == []


def test_what_the_device_fails_with_is_the_groups_end(monkeypatch: pytest.MonkeyPatch) -> None:
    r = Ranks(monkeypatch, 60)
    x = r.group.all_reduce(r.ctx, r.ctx.full((3,), 4, DType.F32))
    r.ended = RuntimeError("NCCL error: remote process exited")
    with pytest.raises(ml.GroupError, match=r"lost another rank.*remote process exited") as caught:
        x.to_numpy()
    assert not caught.value.late
    assert r.native.aborted == 1


def test_a_rank_that_gives_up_has_nccls_kernels_end(monkeypatch: pytest.MonkeyPatch) -> None:
    r = Ranks(monkeypatch, 60)
    r.group.abandon("forward", MemoryError("no memory"))
    with pytest.raises(ml.GroupError, match=r"^forward: rank 0 of 2 failed .*MemoryError: no memory"):
        r.group.barrier()
    assert r.native.aborted == 1


def test_operations_that_go_on_may_take_longer_together(monkeypatch: pytest.MonkeyPatch) -> None:
    r = Ranks(monkeypatch, 1.0)
    for _ in range(5):
        x = r.group.all_reduce(r.ctx, r.ctx.full((1,), 1, DType.F32))
    now = [0.0]
    monkeypatch.setattr(distributed.time, "monotonic", lambda: now[0])

    def sleep(seconds: float) -> None:
        now[0] += 0.6
        assert isinstance(r.ended, int)
        r.ended += round(now[0] / 0.6) % 2 == 0

    monkeypatch.setattr(distributed.time, "sleep", sleep)
    monkeypatch.setattr(distributed, "POLL", 0.6)
    r.group._timeout = 1.5  # type: ignore[attr-defined]
    assert x.to_numpy().tolist() == [2]
    assert now[0] > 1.5


def test_torchs_watchdog_does_not_end_the_process_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def init(engine: str, **options: Any) -> None:
        seen.append(os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING"))
        raise RuntimeError("no NCCL here")

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(distributed, "_rendezvous", lambda *args: None)
    monkeypatch.setattr(distributed.dist, "init_process_group", init)
    with TorchBackend(device="cpu") as backend:
        for given in (None, "3"):
            monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
            if given is not None:
                monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", given)
            with pytest.raises(ml.GroupError, match="no NCCL here"):
                distributed.join(backend, torch.device("cuda", 0), 1.0)
            monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    assert seen == ["0", "3"]
