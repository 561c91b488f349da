"""Pages of CUDA tensors, on streams and events that late_cuda.py stands in for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ml
from ml import DType
from ml.testing.transfers import PageTransferTests

torch = pytest.importorskip("torch")

from backends.torch.backend import TorchBackend  # noqa: E402
from backends.torch.transfer import TorchPages  # noqa: E402

from ..kvcache.prefix.test_conversations import run_machine  # noqa: E402
from ..rigs.each_backend import opener  # noqa: E402
from .late_cuda import CUDA, late_cuda  # noqa: E402

SEEDS = range(12)


def open_far() -> TorchBackend:
    backend = TorchBackend(device="cpu")
    backend.pages = TorchPages()
    backend.overwrite = lambda ctx, tensor: None  # type: ignore[method-assign]
    return backend


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with late_cuda(monkeypatch) as found:
        yield found


class TestPages(PageTransferTests):
    open_backend = opener(open_far)


@pytest.fixture
def backend() -> Iterator[TorchBackend]:
    with open_far() as opened:
        yield opened


@pytest.mark.parametrize("cache", ["causal", "wrapper of chunks", "recurrent and sliding"])
def test_conversations_see_what_was_said(backend: TorchBackend, cache: str) -> None:
    run_machine(backend, 4, cache=cache)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_page_leaves_after_what_was_written_before_and_arrives_before_what_is_joined(
    backend: TorchBackend, seed: int
) -> None:
    CUDA.reset(seed)
    ctx, seen = backend.new_context(), []
    source, target = ctx.zeros((8,), DType.F32), ctx.zeros((8,), DType.F32)
    CUDA.given(lambda: source.native.fill_(3))
    found = backend.page_out(ctx, [source])
    assert found is not None
    (array,), out = found
    CUDA.given(lambda: seen.append(target.native.tolist()))
    arriving = backend.page_in(ctx, [np.full(8, 5, np.float32)], [target])
    assert arriving is not None
    arriving.join()
    CUDA.given(lambda: seen.append(target.native.tolist()))
    out.join()
    CUDA.given(lambda: source.native.fill_(9))
    CUDA.draw()
    out.wait()
    assert array.tolist() == [3] * 8
    while CUDA.compute.queue:
        CUDA.step()
    assert seen == [[0] * 8, [5] * 8]
    assert arriving.done()


def test_the_host_waits_for_nothing_that_it_does_not_ask_for(backend: TorchBackend) -> None:
    ctx = backend.new_context()
    tensors = [ctx.full((64,), i, DType.F16) for i in range(4)]
    found = backend.page_out(ctx, tensors)
    arriving = backend.page_in(ctx, [np.zeros(64, np.float16)], tensors[:1])
    assert found is not None
    assert arriving is not None
    assert sum(len(stream.queue) for stream in CUDA.streams) > 5, "all of it is still under way"
    found[1].wait()
    assert [array[0] for array in found[0]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("tokens", "count", "pieces"), [(1024, 1024, 4), (64, 64, 1), (512, 64, 4), (512, 8, 1)]
)
def test_the_beginning_of_each_heads_tokens_is_copied_from_where_it_lies_in_one_copy_for_each_run(
    backend: TorchBackend, tokens: int, count: int, pieces: int
) -> None:
    ctx = backend.new_context()
    page = np.random.default_rng(2).random((4, tokens, 128), np.float32)
    part, place = page[:, :count], ctx.zeros((4, 2048, 128), DType.F32).slice(ctx, 1, 512, 512 + count)
    arriving = backend.page_in(ctx, [part], [place])
    assert arriving is not None
    ((_, source),) = arriving._kept  # type: ignore[attr-defined]
    assert source.data_ptr() == page.ctypes.data
    assert sum(callable(one) for one in CUDA.streams[-1].queue) == pieces
    arriving.wait()
    np.testing.assert_array_equal(place.to_numpy(), part)


def test_what_is_under_way_is_kept_until_it_is_done(backend: TorchBackend) -> None:
    ctx = backend.new_context()
    target = ctx.zeros((16,), DType.F32)
    arriving = backend.page_in(ctx, [np.ones(16, np.float32)], [target])
    assert arriving is not None
    kept: Any = arriving._kept  # type: ignore[attr-defined]
    assert kept[0][0].data_ptr() == target.native.data_ptr()
    arriving.wait()
    assert arriving._kept is None  # type: ignore[attr-defined]


def test_host_memory_that_cannot_be_locked_is_refused_by_its_size(
    backend: TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(ml.DeviceError, match=r"page-locked host memory for \(4096,\).*ulimit -l"):
        backend.pinned_memory(4096)


def test_without_a_cuda_device_pages_go_the_ordinary_way() -> None:
    with TorchBackend(device="cpu") as backend:
        assert backend.pinned_memory(16) is None
        ctx = backend.new_context()
        assert backend.page_out(ctx, [ctx.zeros((2,), DType.F32)]) is None
