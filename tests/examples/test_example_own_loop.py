"""examples/own_loop: attention with the cache is attention computed without one."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import backends.cupy
from backends.cupy import plugin

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "own_loop"
DIM, HEADS, KV_HEADS = 32, 4, 2
TEXTS = {0: 11, 1: 7, 2: 9}
"""Tokens of each text."""
BATCHES = [
    [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1)],
    [(1, 2), (0, 5)],
    [(2, 0), (2, 1), (2, 2), (2, 3), (2, 4), (2, 5), (1, 3), (0, 6), (0, 7)],
    [(0, 8), (1, 4), (2, 6)],
    [(2, 7), (1, 5), (0, 9)],
    [(0, 10), (1, 6), (2, 8)],
]
"""(text, position) of every token, in the order in which a server might see them."""


def plain_attention(query: Any, key: Any, value: Any, window: int | None) -> np.ndarray:
    """Token by token and head by head, in float64; query, key and value are (tokens, heads, head_dim)."""
    q, k, v = (np.asarray(x, np.float64) for x in (query, key, value))
    group = q.shape[1] // k.shape[1]
    result = np.empty(q.shape)
    for t in range(q.shape[0]):
        first = 0 if window is None else max(0, t - window)
        for h in range(q.shape[1]):
            keys, values = k[first : t + 1, h // group], v[first : t + 1, h // group]
            scores = keys @ q[t, h] / np.sqrt(q.shape[2])
            weights = np.exp(scores - scores.max())
            result[t, h] = weights / weights.sum() @ values
    return result.reshape(q.shape[0], -1)


def through_the_cache(
    attention: Any, texts: dict[int, np.ndarray], wrap: Callable[..., Any], unwrap: Callable[..., Any]
) -> dict[int, np.ndarray]:
    """The outputs of each text's tokens, computed in BATCHES."""
    found: dict[int, list[np.ndarray]] = {text: [] for text in texts}
    for batch in BATCHES:
        x = wrap(np.stack([texts[text][position] for text, position in batch]))
        out = unwrap(attention(x, [position for _, position in batch], [text for text, _ in batch]))
        for (text, _), row in zip(batch, out, strict=True):
            found[text].append(row)
    return {text: np.stack(rows) for text, rows in found.items()}


def texts() -> dict[int, np.ndarray]:
    rng = np.random.default_rng(7)
    return {text: rng.standard_normal((n, DIM)).astype(np.float32) for text, n in TEXTS.items()}


def attention_of(name: str) -> Any:
    return runpy.run_path(str(FOLDER / f"{name}_attention.py"))["Attention"]


PARTS = "devices", "tensor", "ragged", "backend"
"""Of the CuPy backend, which know the module."""
WINDOWS = pytest.mark.parametrize("window", [None, 0, 1, 3, 30])


@WINDOWS
@pytest.mark.parametrize("name", ["torch", "mlx"])
def test_attention_of_three_texts_is_plain_attention_of_each(name: str, window: int | None) -> None:
    module = pytest.importorskip({"mlx": "mlx.core"}.get(name, name), reason=f"{name} is not installed")
    if name == "torch":
        module.manual_seed(0)
        wrap, unwrap = module.from_numpy, lambda x: x.detach().numpy()
    else:
        module.random.seed(0)
        wrap, unwrap = module.array, np.array
    attention = attention_of(name)(DIM, HEADS, KV_HEADS, window)
    found = through_the_cache(attention, texts(), wrap, unwrap)
    output = unwrap(attention.output.weight)
    for text, x in texts().items():
        want = plain_attention(*map(unwrap, attention.project(wrap(x))), window) @ output.T
        np.testing.assert_allclose(found[text], want, atol=2e-6)
        np.testing.assert_allclose(unwrap(attention.without_cache(wrap(x), window)), want, atol=2e-6)


# CuPy: on a double of it, and on the real one where there is a GPU.


def double_of_cupy() -> Any:
    """fake_cupy.py, with what the example asks of CuPy and the backend does not."""
    file = ROOT / "tests/rigs/fake_cupy.py"
    spec = importlib.util.spec_from_file_location(f"{__package__}.fake_cupy_of_the_example", file)
    assert spec is not None
    assert spec.loader is not None
    double: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(double)
    array, kernel = double.ndarray, double.kernel
    for name in ("reshape", "transpose"):
        setattr(array, name, lambda self, *a, name=name: self._alias(getattr(self.array, name)(*a)))
    for name in ("__le__", "__ge__", "__and__", "__abs__"):
        setattr(array, name, double._operator(name))
    array.__len__ = lambda self: len(self.array)
    array.__float__ = lambda self: float(double.host(self))
    return SimpleNamespace(double=double, modules=extended(double, kernel), made=double.made)


def extended(double: Any, kernel: Any) -> dict[str, ModuleType]:
    """The modules of the double, with these functions in the signatures that CuPy gives them."""

    class RandomState:
        def __init__(self, seed: int) -> None:
            self.random = np.random.RandomState(seed)

        def standard_normal(self, size: Any = None, dtype: Any = float) -> Any:
            return double.made(self.random.standard_normal(size).astype(dtype))

    def arange(start: int, stop: Any = None, step: int = 1, dtype: Any = None) -> Any:
        return double.made(np.arange(start))

    def stack(tup: Any, axis: int = 0, out: Any = None, *, dtype: Any = None, casting: str = "") -> Any:
        return kernel("stack", lambda *arrays: np.stack(arrays, axis), *tup)

    def repeat(a: Any, repeats: int, axis: Any = None) -> Any:
        return kernel("repeat", lambda x: np.repeat(x, repeats, axis), a)

    found: dict[str, ModuleType] = double.modules()
    cupy: Any = found["cupy"]
    vars(cupy).update(arange=arange, stack=stack, repeat=repeat, inf=np.inf)
    cupy.random = SimpleNamespace(RandomState=RandomState)
    return found


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The double in CuPy's place, under our backend too; nothing of it stays behind."""
    double = double_of_cupy()
    backend = [f"backends.cupy.{name}" for name in PARTS]
    names = [name for name in sys.modules if name.split(".")[0] in ("cupy", "cupyx") or name in backend]
    before = {name: sys.modules.pop(name) for name in names}
    attributes = {name: vars(backends.cupy).pop(name, None) for name in PARTS}
    sys.modules.update(double.modules)
    monkeypatch.setattr("ml.plugins._registry", None)  # what the real one's probe found is kept there
    try:
        yield double
    finally:
        for name in (*double.modules, *backend):
            sys.modules.pop(name, None)
        sys.modules.update(before)
        for name, module in attributes.items():
            vars(backends.cupy).pop(name, None)
            if module is not None:
                setattr(backends.cupy, name, module)


@WINDOWS
def test_cupy_attention_of_three_texts_is_plain_attention_of_each_on_the_double(
    cupy: Any, window: int | None
) -> None:
    attention = attention_of("cupy")(DIM, HEADS, KV_HEADS, window)
    found = through_the_cache(attention, texts(), cupy.made, cupy.double.host)
    for text, x in texts().items():
        projected = (part.array for part in attention.project(cupy.made(x)))
        want = plain_attention(*projected, window)
        np.testing.assert_allclose(found[text], want, atol=2e-6)
        np.testing.assert_allclose(attention.without_cache(cupy.made(x), window).array, want, atol=2e-6)


def test_the_cupy_example_runs_as_a_script_on_the_double(
    cupy: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(FOLDER / "cupy_attention.py"), run_name="__main__")
    says_that_both_are_equal(capsys.readouterr().out)


def test_what_the_double_adds_for_the_example_is_in_cupy() -> None:
    real = pytest.importorskip("cupy", reason="CuPy is not installed")
    modules: Any = double_of_cupy().modules["cupy"]
    for name in ("arange", "stack", "repeat"):
        ours = [*inspect.signature(getattr(modules, name)).parameters]
        assert ours == [*inspect.signature(getattr(real, name)).parameters]
    ours = [*inspect.signature(modules.random.RandomState.standard_normal).parameters]
    assert ours == [*inspect.signature(real.random.RandomState.standard_normal).parameters]
    for name in ("reshape", "transpose", "__le__", "__ge__", "__and__", "__abs__", "__len__", "__float__"):
        assert hasattr(real.ndarray, name)


@pytest.mark.parametrize("name", ["torch", "mlx", "cupy"])
def test_the_example_runs_as_a_script(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "cupy" and not (found := plugin.probe()).ok:
        pytest.skip(f"cupy cannot run here: {found.reason}")
    pytest.importorskip({"mlx": "mlx.core"}.get(name, name), reason=f"{name} is not installed")
    runpy.run_path(str(FOLDER / f"{name}_attention.py"), run_name="__main__")
    says_that_both_are_equal(capsys.readouterr().out)


def says_that_both_are_equal(output: str) -> None:
    lines = output.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["window None", "window 3"]
    for line in lines:
        assert "decoding with the cache equals attention over the whole past, to " in line
        assert float(line.rpartition(" ")[2]) < 1e-5


@pytest.mark.parametrize("name", ["torch", "mlx", "cupy"])
def test_an_example_is_read_in_two_minutes(name: str) -> None:
    assert len((FOLDER / f"{name}_attention.py").read_text(encoding="utf-8").splitlines()) <= 65
