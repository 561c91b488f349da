"""The same answers everywhere: what a cache holds, bit for bit, and what a model says, on every backend.

NumPy is what the others are compared with. JAX compiles for every shape, so it gets a part of the
cases, in a padded arrangement that repeats its shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import ml
from kvcache import Batch, CausalCache, SlidingWindowCache
from kvcache.runner.generate import Generator
from kvcache.runner.loading import load_model
from kvcache.runner.options import EngineOptions
from kvcache.runner.requests import GenerationOptions
from kvcache.runner.tokenizer import Tokenizer
from ml import DType, Layout
from ml.nn import RopeSpec, rope_shift
from ml.testing.harness import bits

OpenAny = Callable[[str], AbstractContextManager[ml.Backend]]

SEQUENCES, CAPACITY, MAX_BATCH, LAYERS = 3, 16, 12, 2
HEADS, KEY_DIM, VALUE_DIM = 2, 8, 6
TOLERANCE = {DType.F32: (1e-5, 1e-5), DType.F16: (2e-3, 1e-5), DType.BF16: (1.6e-2, 1e-5)}
"""Relative and absolute, of shifted keys: sines may differ in the last bits, and round apart by an ulp."""


class Case(NamedTuple):
    kind: str
    dtype: DType
    config: ml.CacheConfig

    def cache(self, backend: ml.Backend, shift: Any = None) -> CausalCache:
        window = self.kind == "window"
        cache = SlidingWindowCache(4, 6, shift) if window else CausalCache(shift)
        cache.set_config(self.config)
        cache.init(backend, self.dtype, SEQUENCES, CAPACITY, MAX_BATCH)
        return cache

    def __str__(self) -> str:
        permuted = "permuted v" if self.config.permuted_v else "plain v"
        return f"{self.kind}, {self.dtype.name}, {self.config.layout}, {permuted}"


CASES = [
    Case(kind, dtype, ml.CacheConfig(mask_dtype=dtype, permuted_v=permuted, layout=layout))
    for kind in ("causal", "window")
    for dtype in (DType.F32, DType.F16, DType.BF16)
    for layout in Layout
    for permuted in (False, True)
]
PADDED = [
    Case("causal", DType.F32, ml.CacheConfig(32, 12, DType.F32, True, Layout.HEAD_MAJOR)),
    Case("causal", DType.F16, ml.CacheConfig(32, 12, DType.F16, False, Layout.TOKEN_MAJOR)),
    Case("window", DType.BF16, ml.CacheConfig(32, 12, DType.BF16, True, Layout.TOKEN_MAJOR)),
]
OTHERS = [(name, case) for name in ("torch", "mlx") for case in (*CASES, *PADDED)]
OTHERS += [("jax", case) for case in PADDED]


def each(others: list[tuple[str, Case]]) -> pytest.MarkDecorator:
    named = [pytest.param(*both, id=f"{both[0]}: {both[1]}") for both in others]
    return pytest.mark.parametrize(("name", "case"), named)


SPECIAL = np.array(
    [
        0.0, -0.0, np.inf, -np.inf,
        1 + 2**-11, 1 + 3 * 2**-11, -(1 + 2**-11), 1 + 2**-8, 1 + 3 * 2**-8, -(1 + 3 * 2**-8),  # ties
        1 + 2**-11 + 2**-23, 1 + 2**-8 - 2**-23,  # beside ties
        2**-24, 3 * 2**-24, 2**-25, 3 * 2**-25, 2**-25 + 2**-45, 2**-14 - 2**-25,  # subnormal in F16
        2**-149, 1e-40, -3e-39, 2**-134, 3 * 2**-134, 2**-126 - 2**-149,  # subnormal in F32 and BF16
        65504, 65519.99, 65520, -65520, 1e6, 3.3895e38, 3.3961e38, 3.4028235e38, -3.4028235e38,  # overflow
    ],
    np.float32,
)  # fmt: skip


class Driver:
    """One cache under a fixed sequence of calls; ``seen`` is all that it showed."""

    def __init__(self, case: Case, backend: ml.Backend, shifts: bool = False) -> None:
        self.case, self.random = case, np.random.default_rng(20261121)
        self.cache = case.cache(backend, self.turn if shifts else None)
        self.turned: list[int] = []
        self.ctx = backend.new_context()
        self.shifts = shifts
        self.seen: list[tuple[str, np.ndarray]] = []

    def forward(self, *counts: int) -> None:
        """A pass with the next tokens of each sequence, those of the sequences mixed up."""
        sequences = self.random.permutation(np.repeat(np.arange(len(counts)), counts))
        ends = [int(self.cache.positions(seq).max(initial=-1)) + 1 for seq in range(len(counts))]
        positions = []
        for seq in sequences:
            positions.append(ends[seq])
            ends[seq] += 1
        self.cache.start_forward(self.ctx, Batch(positions, sequences.tolist()))
        for layer in range(LAYERS):
            self.cache.set_layer(layer)
            shapes = ((len(positions), HEADS, dim) for dim in (KEY_DIM, VALUE_DIM))
            self.cache.put(self.ctx, *(self.ctx.from_numpy(self.data(shape)) for shape in shapes))
        for layer in range(LAYERS):
            self.cache.set_layer(layer)
            key, value, mask = self.cache.get(self.ctx)
            assert mask is not None
            self.note(key, value, mask)  # type: ignore[arg-type]

    def data(self, shape: tuple[int, ...]) -> np.ndarray:
        normal = self.random.normal(size=shape).astype(np.float32)
        if self.shifts:  # a rotation of an infinity is no number
            return normal
        return np.where(self.random.random(shape) < 0.5, self.random.choice(SPECIAL, shape), normal)

    def note(self, key: ml.Tensor, value: ml.Tensor, mask: ml.Tensor) -> None:
        """Keys and values that no query sees are masked, and need not even be numbers."""
        shown = mask.to_numpy()
        some = (shown == 0).any(axis=0)
        values = value.to_numpy()
        values = values[:, :, some] if self.case.config.permuted_v else values[some]
        self.seen += [("key", key.to_numpy()[some]), ("value", values), ("mask", shown)]

    def turn(self, ctx: ml.Context, layer: int, key: ml.Tensor, offsets: ml.Tensor) -> ml.Tensor:
        self.turned.append(int((offsets.to_numpy() != 0).sum()))
        return rope_shift(RopeSpec(KEY_DIM))(ctx, layer, key, offsets)

    def run(self) -> list[tuple[str, np.ndarray]]:
        """Several sequences, sharing, removal, a full window, and a batch that fills scattered holes."""
        self.forward(5, 3, 2)
        self.forward(1, 1, 1)
        self.cache.copy_prefix(0, 2, 4)
        self.forward(2, 1, 3)
        self.cache.remove(1, 0)
        self.forward(4, 0, 1)
        self.cache.remove(0, int(self.cache.positions(0)[-1]) - 1)
        self.forward(1, 7, 2)
        if self.shifts:
            begin = int(self.cache.positions(1)[0])
            self.cache.remove(1, begin, begin + 2)
            assert len(self.turned) == LAYERS
            assert min(self.turned) > 3
            self.forward(1, 1, 1)
        self.cache.defrag()
        self.forward(1, 1, 1)
        self.cache.copy_prefix(1, 0, 3)
        for _ in range(3):
            self.forward(1, 1, 1)
        self.ctx.close()
        self.cache.close()
        return self.seen


@functools.cache
def on_numpy(case: Case, shifts: bool = False) -> list[tuple[str, np.ndarray]]:
    with ml.open_backend("numpy") as backend:
        return Driver(case, backend, shifts).run()


@pytest.fixture(scope="module")
def opened(open_any: OpenAny) -> Iterator[Callable[[str], ml.Backend]]:
    """Every backend once."""
    with ExitStack() as stack:
        yield functools.cache(lambda name: stack.enter_context(open_any(name)))


Opened = Callable[[str], ml.Backend]


@each(OTHERS)
def test_keys_values_and_masks_are_the_same_bit_for_bit(opened: Opened, name: str, case: Case) -> None:
    expected, found = on_numpy(case), Driver(case, opened(name)).run()
    assert len(found) == len(expected)
    for i, ((what, left), (_, right)) in enumerate(zip(found, expected, strict=True)):
        assert left.dtype == right.dtype == case.dtype.numpy
        np.testing.assert_array_equal(bits(left), bits(right), f"{what}, the {i}th thing shown")


@each([both for both in OTHERS if both[1].kind == "causal"])  # a window refuses to lose what it resumes from
def test_shifted_keys_agree_within_the_rounding_of_a_sine(opened: Opened, name: str, case: Case) -> None:
    expected, found = on_numpy(case, True), Driver(case, opened(name), True).run()
    relative, absolute = TOLERANCE[case.dtype]
    assert len(found) == len(expected)
    for (what, left), (_, right) in zip(found, expected, strict=True):
        assert left.dtype == right.dtype
        if what == "key":
            wide = left.astype(np.float64), right.astype(np.float64)
            np.testing.assert_allclose(*wide, rtol=relative, atol=absolute)
        else:
            np.testing.assert_array_equal(bits(left), bits(right), what)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_calls_reach_what_they_are_meant_to(
    opened: Opened, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They write scattered cells, share cells, and store what overflows, is subnormal, and is infinite."""
    backend = opened("numpy")
    with backend.new_context() as ctx:
        kind: Any = type(ctx.zeros((), DType.F32))
    scattered = []
    real = kind.set_rows

    def spy(self: Any, *args: Any, **options: Any) -> Any:
        scattered.append(args)
        return real(self, *args, **options)

    monkeypatch.setattr(kind, "set_rows", spy)
    seen = Driver(case, backend).run()
    assert scattered
    keys = np.concatenate([array.ravel() for what, array in seen if what == "key"]).astype(np.float64)
    assert np.isinf(keys).any()
    smallest = {DType.F32: 2.0**-126, DType.F16: 2.0**-14, DType.BF16: 2.0**-126}[case.dtype]
    assert ((keys != 0) & (np.abs(keys) < smallest)).any()
    assert any(((array == 0).sum(axis=0) > 1).any() for what, array in seen if what == "mask")


@pytest.mark.parametrize(("name", "count"), [("numpy", 200), ("torch", 200), ("mlx", 200), ("jax", 80)])
def test_the_known_answer(opened: Opened, stories: Path, stories_text: str, name: str, count: int) -> None:
    """stories260K, greedy."""
    model = load_model(stories, opened(name))
    with Generator(
        model, Tokenizer.load(stories), options=EngineOptions(max_sequences=1, capacity=256)
    ) as generator:
        (answer,) = generator.complete([""], GenerationOptions(count))
    assert len(answer.tokens) == count
    assert answer.text == stories_text if count == 200 else stories_text.startswith(answer.text)
