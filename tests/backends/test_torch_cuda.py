"""PyTorch's CUDA paths on devices that are not there (cuda_double.py): values, places, waits, uploads."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

import ml
from kvcache import (
    Batch,
    CausalCache,
    ChunkedCache,
    EncoderCache,
    RecurrentCache,
    SlidingWindowCache,
    WrapperCache,
)
from kvcache.attention import masks
from ml.testing.attention import AttentionTests
from ml.testing.optional import CapabilityTests
from ml.testing.rows import RowTests

torch = pytest.importorskip("torch")

from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from ..rigs.cuda_double import Transfers, cuda_double  # noqa: E402

KV_HEADS, HEADS, DIM, LAYERS = 2, 4, 32, 4
BF16 = ml.DType.BF16


@pytest.fixture
def transfers() -> Iterator[Transfers]:
    with cuda_double(2) as found:
        yield found


def test_blocks_of_quantized_storage_are_larger_on_a_device(transfers: Transfers) -> None:
    with ml.open_backend("torch", device="cuda:0") as there, ml.open_backend("torch", device="cpu") as here:
        assert isinstance(there, ml.SupportsCacheConfig)
        assert isinstance(here, ml.SupportsCacheConfig)
        assert there.cache_config().call_bytes > here.cache_config().call_bytes == ml.CacheConfig().call_bytes


def tokens(seq: int, begin: int, end: int) -> list[tuple[int, int]]:
    return [(seq, position) for position in range(begin, end)]


class Loop:
    """Passes over all layers of one cache: each layer's tensors lie on the layer's device beforehand."""

    def __init__(
        self, devices: Sequence[str], cache: Any, dtype: ml.DType, stored: ml.DType, **config: Any
    ) -> None:
        self.backend = ml.open_backend("torch", devices=list(devices), layers=LAYERS)
        self.ctx = self.backend.new_context()
        self.cache, self.dtype, self.random = cache, dtype, np.random.default_rng(0)
        cache.set_config(ml.CacheConfig(elide_mask=True, mask_dtype=dtype, **config))
        cache.init(self.backend, stored, 4, 192, 64)
        self.sinks: np.ndarray | None = None
        self.latent = self.chosen = 0
        """How many numbers of a key are its value; how many rows a query chooses. 0: values, and all rows."""

    def made(self, count: int, heads: int) -> list[Any]:
        rows = self.random.standard_normal((LAYERS, count, heads, DIM)).astype(np.float32)
        return [self.ctx.layer(i).from_numpy(rows[i], self.dtype) for i in range(LAYERS)]

    def step(
        self, places: Sequence[tuple[int, int]], get: bool = False, log: Transfers | None = None
    ) -> list[Any]:
        """One pass; with ``log``, of which only the pass itself is in it."""
        ctx, cache, count = self.ctx, self.cache, len(places)
        inputs = [self.made(count, heads) for heads in (KV_HEADS, KV_HEADS, HEADS)]
        sinks = [
            None if self.sinks is None else ctx.layer(i).from_numpy(self.sinks, self.dtype)
            for i in range(LAYERS)
        ]
        options: list[dict[str, Any]] = [{}] * LAYERS
        if self.chosen:
            history = np.tile(np.arange(self.chosen), (count, 1))
            options = [{"select": ctx.layer(i).from_numpy(history, ml.DType.I32)} for i in range(LAYERS)]
            index = self.made(count, 1)
        if log is not None:
            log.clear()
        cache.start_forward(ctx, Batch([p for _, p in places], [s for s, _ in places]))
        found: list[Any] = []
        for layer, (key, value, query) in enumerate(zip(*inputs, strict=True)):
            if isinstance(cache, WrapperCache):
                cache.set_layer_type(layer % len(cache.caches))
            cache.set_layer(layer)
            here = ctx.layer(layer)
            if self.chosen:
                cache.put(here, key, value, extra={"index": index[layer]})
                found.append(cache.get_extra(here, "index"))
            elif self.latent:
                cache.put(here, key, v_dim=self.latent)
            else:
                cache.put(here, key, value)
            if not get:
                found.append(cache.attend(here, query, DIM**-0.5, sinks[layer], **options[layer]))
            elif not self.chosen:
                found.append(cache.get(here))
        return found


def decode(loop: Loop) -> Iterator[list[tuple[int, int]]]:
    """Three sequences of different lengths, token by token."""
    for seq, length in enumerate((5, 40, 23)):
        yield tokens(seq, 0, length)
    for i in range(3):
        yield [(0, 5 + i), (1, 40 + i), (2, 23 + i)]


def prefill(loop: Loop) -> Iterator[list[tuple[int, int]]]:
    for begin in range(0, 60, 20):
        yield tokens(0, begin, begin + 20)
    yield tokens(0, 60, 70)


def mixed(loop: Loop) -> Iterator[list[tuple[int, int]]]:
    """A token of one, a chunk of another."""
    yield tokens(0, 0, 30) + tokens(1, 0, 9)
    for i in range(2):
        yield [(0, 30 + i), *tokens(1, 9 + 7 * i, 16 + 7 * i)]


def shared(loop: Loop) -> Iterator[list[tuple[int, int]]]:
    """Three readers of one prefix."""
    yield tokens(0, 0, 48)
    for seq in (1, 2):
        loop.cache.copy_prefix(0, seq, 48)
    for i in range(3):
        yield [(seq, 48 + i) for seq in range(3)]


def restored(loop: Loop) -> Iterator[list[tuple[int, int]]]:
    yield tokens(0, 0, 20)
    yield tokens(1, 0, 8)
    taken = loop.cache.snapshot(0)
    taken.detach()
    loop.cache.remove(0, 0)
    assert loop.cache.restore(2, taken)
    for i in range(2):
        yield [(1, 8 + i), (2, 20 + i)]


def together(loop: Loop) -> Iterator[list[tuple[int, int]]]:
    """The first pass has three sequences, of which one lies scattered: they take turns."""
    yield [*tokens(0, 0, 9), *tokens(1, 0, 40)] + [(2 + i % 2, i // 2) for i in range(8)]
    for i in range(2):
        yield [(0, 9 + i), (1, 40 + i), (3, 4 + i)]


def elsewhere(loop: Loop) -> Iterator[list[tuple[int, int]]]:
    """The first pass of a cache goes on with what another has computed."""
    ours, loop.cache = loop.cache, type(loop.cache)()
    loop.cache.set_config(ours.config)
    loop.cache.init(loop.backend, BF16, 4, 192, 64)
    for seq, length in ((0, 30), (1, 7)):
        loop.step(tokens(seq, 0, length))
    taken = [loop.cache.snapshot(seq) for seq in (0, 1)]
    loop.cache, theirs = ours, loop.cache
    for seq, one in zip((2, 0), taken, strict=True):
        one.detach()
        assert ours.restore(seq, one)
    theirs.close()
    for i in range(2):
        yield [(0, 7 + i), (2, 30 + i)]


def two_kinds() -> WrapperCache:
    return WrapperCache(SlidingWindowCache(16), CausalCache())


SCENES: dict[str, Any] = {
    "decode": (decode, CausalCache, {}),
    "prefill": (prefill, CausalCache, {}),
    "mixed": (mixed, CausalCache, {}),
    "shared": (shared, CausalCache, {}),
    "restored": (restored, CausalCache, {}),
    "window": (decode, lambda: SlidingWindowCache(16), {}),
    "window-prefill": (prefill, lambda: SlidingWindowCache(16), {}),
    "Q8_0": (decode, CausalCache, {"stored": ml.DType.Q8_0}),
    "Q4_0": (mixed, CausalCache, {"stored": ml.DType.Q4_0}),
    "F32": (mixed, CausalCache, {"dtype": ml.DType.F32, "stored": ml.DType.F32}),
    "sinks": (mixed, CausalCache, {"sinks": True}),
    "fixed": (decode, CausalCache, {"fixed_context": 64}),
    "together": (together, CausalCache, {}),
    "restored-first": (elsewhere, CausalCache, {}),
    "chunk": (mixed, lambda: ChunkedCache(16), {}),
    "two-kinds": (mixed, two_kinds, {}),
    "two-kinds-first": (together, two_kinds, {}),
    "two-kinds-fixed": (together, two_kinds, {"fixed_context": 64}),
    "beside-states": (mixed, lambda: WrapperCache(RecurrentCache((1,), (1,)), CausalCache()), {}),
    "padded": (mixed, CausalCache, {"cache_padding": 8, "mask_batch_padding": 8}),
    "latent": (mixed, CausalCache, {"latent": 16}),
    "latent-Q8_0": (decode, CausalCache, {"latent": 16, "stored": ml.DType.Q8_0}),
    "chosen": (mixed, CausalCache, {"chosen": 64}),
    "chosen-scattered": (together, CausalCache, {"chosen": 70, "sinks": True}),
}
LAYOUTS = {"two": ["cuda:0", "cuda:1"], "host": ["cpu", "cuda:0"]}


def opened(scene: str, devices: Sequence[str]) -> tuple[Loop, Any]:
    places, make, options = SCENES[scene]
    options = {"dtype": BF16, "stored": BF16, **options}
    sinks, latent, chosen = (options.pop(name, 0) for name in ("sinks", "latent", "chosen"))
    loop = Loop(devices, make(), **options)
    loop.latent, loop.chosen = latent, chosen
    loop.sinks = np.linspace(-1, 1, HEADS).astype(np.float32) if sinks else None
    return loop, places(loop)


LARGE = ["decode", "mixed", "window-prefill", "chunk", "two-kinds", "padded"]
OF_BOTH = [*LARGE, "shared", "restored", "Q8_0", "together", "two-kinds-first", "latent", "chosen"]
"""Scenes of which the host has layers, too, and whose history is read without attending."""


@pytest.mark.parametrize(
    ("scene", "devices", "get", "large"),
    [
        *itertools.product(SCENES, ["two"], [False], [False]),
        *itertools.product(OF_BOTH, ["host"], [False], [False]),
        *itertools.product(OF_BOTH, ["two"], [True], [False]),
        *itertools.product(LARGE, ["two"], [False, True], [True]),
    ],
)
def test_a_pass_gives_what_the_cpu_gives_neither_waits_nor_crosses_and_uploads_once(
    transfers: Transfers, monkeypatch: pytest.MonkeyPatch, scene: str, devices: str, get: bool, large: bool
) -> None:
    """To each device, the first pass included, with masks that the host writes or (``large``) the device."""
    if large:
        monkeypatch.setattr(masks, "HOST_LIMIT", 0)
        monkeypatch.setattr(masks, "KEEP_LIMIT", 0)
    loop, batches = opened(scene, LAYOUTS[devices])
    found = []
    for batch in batches:
        outs = loop.step(batch, get, log=transfers)
        assert transfers.waits == []
        assert transfers.of("crossing") == []
        assert "scaled_dot_product_attention" not in transfers.operations
        uploaded = [noted.device for noted in transfers.of("upload")]
        assert sorted(uploaded) == sorted(set(uploaded)), transfers.log
        found += [] if get else [out.to_numpy().astype(np.float32) for out in outs]
    for ours, theirs in zip(found, [] if get else on_the_cpu(scene), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=3e-2, rtol=0)


@functools.cache
def on_the_cpu(scene: str) -> list[np.ndarray]:
    """All that its passes give there."""
    loop, batches = opened(scene, ["cpu"])
    return [out.to_numpy().astype(np.float32) for batch in batches for out in loop.step(batch)]


def test_a_pass_that_is_read_in_another_way_uploads_twice_once(transfers: Transfers) -> None:
    loop, found = Loop(["cuda:0"], SlidingWindowCache(16), BF16, BF16), []
    for number, batch in enumerate(decode(loop)):
        loop.step(batch, number > 3, log=transfers)
        found.append(len(transfers.of("upload")))
    assert found[3:] == [1, 2, 1]
    for step in (3, 4):
        loop.step([(0, 5 + step), (1, 40 + step), (2, 23 + step)], log=transfers)
        found.append(len(transfers.of("upload")))
    assert found[6:] == [2, 1]
    reads = loop.cache.pass_under_way().reading.reads()
    assert reads.calls
    assert not reads.shared, "what was foreseen once and not asked for is not foreseen again"


@pytest.mark.parametrize("turns", [False, True], ids=["side by side", "in turns"])
def test_what_encoders_gave_is_read_with_one_upload_or_none(transfers: Transfers, turns: bool) -> None:
    loop = Loop(["cuda:0"], EncoderCache(), BF16, BF16)
    ctx, cache = loop.ctx, loop.cache
    cache.start_forward(ctx, Batch([0, 0], [0, 1]))
    for layer in range(LAYERS):
        cache.set_layer(layer)
        cache.put(ctx, *(loop.made(6, KV_HEADS)[0] for _ in "kv"))
    query = loop.made(4, HEADS)[0]
    transfers.clear()
    cache.start_forward(
        ctx, Batch([1, 1, 2, 2] if turns else [1, 2, 1, 2], [0, 1] * 2 if turns else [0, 0, 1, 1])
    )
    for layer in range(LAYERS):
        cache.set_layer(layer)
        cache.attend(ctx, query, 1.0)
    assert (len(transfers.of("upload")), transfers.waits) == (int(turns), [])


def test_states_of_new_sequences_are_made_on_the_device(transfers: Transfers) -> None:
    with ml.open_backend("torch", device="cuda:0") as backend, backend.new_context() as ctx:
        cache = RecurrentCache((2, 3), (2, 2))
        cache.init(backend, ml.DType.F32, 3, 16, 16)
        for seq in range(3):
            cache.start_forward(ctx, Batch([0], [seq]))
            for layer in range(LAYERS):
                cache.set_conv_state(ctx, layer, ctx.full((1, 2, 3), seq + 1, ml.DType.F32))
                cache.set_recurrent_state(ctx, layer, ctx.zeros((1, 2, 2), ml.DType.F32))
        cache.remove(1, 0)
        transfers.clear()
        cache.start_forward(ctx, Batch([0], [1]))
        state = cache.conv_state(ctx, 0)
        assert transfers.log == []
        assert not state.to_numpy().any()


def on(ctx: Any, values: Any, dtype: ml.DType = ml.DType.F32) -> Any:
    return ctx.from_numpy(np.asarray(values), dtype)


@pytest.mark.parametrize("dtype", [BF16, ml.DType.F32], ids=str)
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_a_chunk_after_a_history_takes_no_mask_and_no_wider_history(
    transfers: Transfers, dtype: ml.DType, sinks: bool
) -> None:
    loop = Loop(["cuda:0"], CausalCache(), dtype, dtype)
    loop.sinks = np.ones(HEADS, np.float32) if sinks else None
    loop.step(tokens(0, 0, 40))
    loop.step(tokens(0, 40, 60), log=transfers)
    assert not {"triu_", "full", "addcmul", "cat", "float"} & set(transfers.operations)
    kernels = {"_scaled_dot_product_flash_attention", "_efficient_attention_forward"}
    used = [name for name in transfers.operations if name in kernels]
    assert used == [sorted(kernels)[dtype is BF16]] * LAYERS
    assert transfers.copied <= 20 * HEADS * DIM


def test_products_of_narrow_dtypes_accumulate_in_f32_and_leave_the_settings(
    transfers: Transfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = torch.backends.cuda.matmul
    names = [
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    ]
    before = {name: getattr(settings, name) for name in names}
    seen: list[dict[str, bool]] = []
    real = torch.matmul

    def product(a: Any, b: Any) -> Any:
        seen.append({name: getattr(settings, name) for name in names})
        return real(a, b)

    monkeypatch.setattr(torch, "matmul", product)
    settings.allow_fp16_accumulation = True
    try:
        with ml.open_backend("torch", device="cuda:0") as backend, backend.new_context() as ctx:
            for dtype in (BF16, ml.DType.F16):
                on(ctx, np.eye(3), dtype).matmul(ctx, on(ctx, np.eye(3), dtype))
        assert settings.allow_fp16_accumulation
        assert not seen[0][names[0]]
        assert not any(seen[1][name] for name in names[1:])
    finally:
        settings.allow_fp16_accumulation = before[names[2]]
    assert {name: getattr(settings, name) for name in names} == before


def test_sorts_of_bool_and_top_k_wait_for_nothing(transfers: Transfers) -> None:
    with ml.open_backend("torch", device="cuda:0") as backend, backend.new_context() as ctx:
        truth, numbers = on(ctx, [True, False, True], ml.DType.BOOL), on(ctx, [2.0, 5.0, 5.0, 1.0])
        transfers.clear()
        order, (values, places) = truth.argsort(ctx), numbers.top_k(ctx, 2)
        assert transfers.log == []
        assert order.to_numpy().tolist() == [1, 0, 2]
        assert (values.to_numpy().tolist(), places.to_numpy().tolist()) == ([5.0, 5.0], [1, 2])


@pytest.mark.parametrize("stored", [BF16, ml.DType.Q8_0], ids=str)
def test_a_context_of_another_device_attends_where_the_history_lies(
    transfers: Transfers, stored: ml.DType
) -> None:
    """The root context lies on the first device, the last layers on the second."""
    loop = Loop(["cuda:0", "cuda:1"], CausalCache(), BF16, stored)
    loop.step(tokens(0, 0, 150))
    right = loop.step([(0, 150)])[-1].to_numpy()
    query = loop.ctx.from_numpy(np.random.default_rng(5).standard_normal((1, HEADS, DIM)), BF16)
    loop.cache.set_layer(LAYERS - 1)
    transfers.clear()
    found = loop.cache.attend(loop.ctx, query, 1.0)
    moved = [(noted.device, noted.nbytes) for noted in transfers.of("crossing")]
    assert moved == [("cuda:1", 2 * HEADS * DIM), ("cuda:0", 2 * HEADS * DIM)]
    assert (found.device, found.shape) == ("cuda:0", right.shape)
    transfers.clear()
    key, value, mask = loop.cache.get(loop.ctx)
    assert transfers.of("crossing") == []
    ml.nn.attention(loop.ctx, query, key, value, mask, 1.0)
    key.rows(loop.ctx, [3, 4])
    assert max(noted.nbytes for noted in transfers.of("crossing")) == 2 * HEADS * DIM


@pytest.mark.parametrize("stored", [ml.DType.F32, BF16, ml.DType.Q8_0], ids=str)
@pytest.mark.parametrize("with_sinks", [False, True], ids=["no sinks", "sinks"])
def test_a_layer_on_the_cpu_is_attended_to_by_a_context_on_a_gpu(
    transfers: Transfers, stored: ml.DType, with_sinks: bool
) -> None:
    """Query and sinks lie on the GPU: the kernel of the CPU is given copies, never their addresses."""
    found = []
    for devices in (["cuda:0", "cpu"], ["cpu"]):
        loop, random = Loop(devices, CausalCache(), BF16, stored), np.random.default_rng(5)
        loop.step([*tokens(0, 0, 40), *tokens(1, 0, 3)])
        loop.step([(0, 40), (1, 3)])
        query = loop.ctx.from_numpy(random.standard_normal((2, HEADS, DIM)), BF16)
        sinks = loop.ctx.from_numpy(random.standard_normal(HEADS), BF16) if with_sinks else None
        loop.cache.set_layer(LAYERS - 1)
        attended = loop.cache.attend(loop.ctx, query, 1.0, sinks)
        assert attended.device == query.device == devices[0]
        found.append(attended.to_numpy())
    assert found[0].tobytes() == found[1].tobytes()


class TestOnTheDouble(AttentionTests, RowTests, CapabilityTests):
    """What the shipped suite asks, of the parts where CUDA has ways of its own."""

    backend_name = "torch"
    backend_options: ClassVar[dict[str, Any]] = {"device": "cuda"}
    case_stride = 5

    @pytest.fixture(autouse=True)
    def _double(self, transfers: Transfers) -> None:
        pass


# The double finds what it is there to find.


@pytest.fixture
def pair(transfers: Transfers) -> tuple[Any, Any]:
    return torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")


PLANTED: dict[str, Any] = {
    "item": lambda a, b: a.sum().item(),
    "truth": lambda a, b: bool((a > 0).any()),
    "nonzero": lambda a, b: a.nonzero(),
    "where": lambda a, b: a[a > 0],
    "to the host": lambda a, b: a.cpu(),
    "numbers": lambda a, b: a.tolist(),
    "pageable": lambda a, b: a.copy_(torch.zeros(3), non_blocking=True),
    "blocking": lambda a, b: a.copy_(torch.zeros(3).pin_memory()),
    "made here": lambda a, b: torch.tensor([1.0, 2.0]).to("cuda:0"),
}


@pytest.mark.parametrize("fault", PLANTED.values(), ids=PLANTED)
def test_a_planted_wait_is_found(transfers: Transfers, pair: Any, fault: Any) -> None:
    assert transfers.waits == []
    fault(*pair)
    assert len(transfers.waits) >= 1


def test_planted_crossings_and_uploads_are_found_and_counted(transfers: Transfers, pair: Any) -> None:
    a, b = pair
    a.copy_(b)
    b.to("cuda:0")
    assert [(noted.device, noted.nbytes) for noted in transfers.of("crossing")] == [("cuda:0", 12)] * 2
    with pytest.raises(RuntimeError, match="on one device"):
        a + b
    for _ in range(2):
        a.copy_(torch.zeros(3).pin_memory(), non_blocking=True)
    assert (len(transfers.of("upload")), transfers.waits) == (2, [])
    with sdpa_kernel(SDPBackend.MATH):  # a build for CUDA would choose another, which the double has not
        torch.nn.functional.scaled_dot_product_attention(*[torch.ones(1, 1, 8, 8, device="cuda:0")] * 3)
    assert "scaled_dot_product_attention" in transfers.operations
