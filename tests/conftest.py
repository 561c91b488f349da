"""Models for the tests of the runner: the trained stories260K where it is, and small random ones."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

import ml
from backends.numpy.backend import NumpyBackend
from kvcache_engine.loading import load_model

from .needs import not_run, wanting
from .rigs.each_backend import need_backend
from .rigs.small_models import KINDS

# Caches on NumPy go by calls of attention here, as they do where numba is not installed; on PyTorch by its
# kernels. Both by the other way: test_cache_kernels.py.
COMPILED = NumpyBackend.ragged_attention


def _over_codes_alone(*call: Any, formats: Any = None) -> Any:
    """By position the backend, context, query, K, V, plan, scale, sinks and formats."""
    return None if len(call) < 9 else COMPILED(*call)


if COMPILED.__name__ == "ragged_attention":  # sessions inside tests import this file again
    NumpyBackend.ragged_attention = _over_codes_alone

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # Jobs in the background are started so, and hand it on to the processes that the tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    # nohup's doing: a handler that does nothing is not handed on.
    signal.signal(signal.SIGHUP, lambda *_: None)

if not Path("/dev/nvidiactl").exists():
    # No GPU: Triton's kernels run in its interpreter, which it has to know when it is first imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # What mlx-lm's models compile is C++ then, which takes seconds each the first time on a machine.
    os.environ.setdefault("MLX_DISABLE_COMPILE", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a class with ``colours``, each table of parameters runs on the squares of these, of four colours."""
    tables: dict[tuple[Any, str], dict[pytest.Item, dict[str, object]]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item.cls, "colours"):
            given = item.callspec.params if hasattr(item, "callspec") else {}
            tables.setdefault((item.cls, item.originalname), {})[item] = given
    left_out = {item for (cls, _), table in tables.items() for item in _off_the_board(table, cls.colours)}
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def _off_the_board(table: dict[pytest.Item, dict[str, object]], colours: tuple[int, ...]) -> set[pytest.Item]:
    """Combinations of other colours, where a table has all; each value of each parameter is still met."""
    axes: dict[str, dict[int, int]] = {}
    for name, value in (pair for given in table.values() for pair in given.items()):
        axis = axes.setdefault(name, {})
        axis.setdefault(id(value), len(axis))
    sizes = [len(axis) for axis in axes.values() if len(axis) > 1]
    step = min(4, *sizes) if len(sizes) > 1 and math.prod(sizes) == len(table) else 1
    chosen = {colour % step for colour in colours}
    return {
        item
        for item, given in table.items()
        if sum(axes[name][id(value)] for name, value in given.items()) % step not in chosen
    }


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """The last line of all, below pytest's own: what was not run, and what it takes."""
    yield
    terminal = session.config.pluginmanager.getplugin("terminalreporter")
    skipped = () if terminal is None else terminal.stats.get("skipped", ())
    if line := not_run(report.longrepr[2] for report in skipped if isinstance(report.longrepr, tuple)):
        terminal.write_line(line)


def pytest_collection_finish() -> None:
    """What exists by now stays to the end: a million objects that no later garbage collection looks through.

    Every session of pytest inside a test ends with several collections. Hypothesis 6.100, the oldest that is
    admitted, then calls a test flaky that is not.
    """
    gc.collect()
    if hypothesis.__version_info__ >= (6, 150):
        _any_truth()  # Hypothesis looks, once, for what refers to its random numbers
        gc.freeze()


@hypothesis.settings(max_examples=1, database=None)
@hypothesis.given(hypothesis.strategies.booleans())
def _any_truth(value: bool) -> None:
    assert value in (True, False)


QUICK_TO_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""XLA_FLAGS, which JAX reads when it is first used: XLA compiles faster where it optimizes nothing."""
STORIES = Path(__file__).resolve().parents[2] / "shared" / "models" / "stories260K"


@pytest.fixture(scope="session")
def stories() -> Path:
    """The folder of stories260K, a real model whose greedy text is known."""
    if not STORIES.is_dir():
        pytest.skip(wanting("the model stories260K", f"put it beside the repository, in {STORIES}"))
    return STORIES


@pytest.fixture(scope="session")
def stories_text(stories: Path) -> str:
    """What stories260K says after BOS, greedy, 200 tokens."""
    return (stories / "README.md").read_text(encoding="utf-8").split("against:\n\n")[1].strip("\n")


@pytest.fixture(scope="session", params=["numpy", "torch", "mlx"])
def runner_backend(request: pytest.FixtureRequest) -> Iterator[ml.Backend]:
    with _open_any(request.param) as backend:
        yield backend


@pytest.fixture(scope="session")
def open_any() -> Callable[[str], contextlib.AbstractContextManager[ml.Backend]]:
    """``with open_any(name) as backend``: any backend, the JAX example too; skips what cannot run here."""
    return _open_any


@contextlib.contextmanager
def _open_any(name: str) -> Iterator[ml.Backend]:
    with contextlib.ExitStack() as stack:
        if name == "jax" and name not in ml.plugins.registry().specs():
            stack.enter_context(_jax_example())
        need_backend(name)
        stack.enter_context(one_torch_thread(name))
        yield stack.enter_context(ml.open_backend(name))


@pytest.fixture(scope="module")
def backends() -> Iterator[Callable[[str], ml.Backend]]:
    """``backends(name)``: each is opened when it is first asked for; skips what cannot run here."""
    opened: dict[str, ml.Backend] = {}
    with contextlib.ExitStack() as stack:

        def get(name: str) -> ml.Backend:
            if name not in opened:
                opened[name] = stack.enter_context(_open_any(name))
            return opened[name]

        yield get


@pytest.fixture
def unprobed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends and stores are probed anew in the test, and what is found there is forgotten after it."""
    monkeypatch.setattr("ml.plugins._registry", None)
    monkeypatch.setattr("kvcache.stores.plugins._registry", None)


@contextlib.contextmanager
def _jax_example() -> Iterator[None]:
    """The plugin of examples/ml-backend-jax, registered by hand where it is not installed."""
    pytest.importorskip("jax", reason="jax is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", QUICK_TO_COMPILE)
        patch.syspath_prepend(Path(__file__).resolve().parents[1] / "examples" / "ml-backend-jax")
        plugin = importlib.import_module("ml_backend_jax")
        ml.plugins.registry().register(plugin, "jax")
        try:
            yield
        finally:
            ml.plugins.registry().unregister(plugin)


@contextlib.contextmanager
def one_torch_thread(name: str) -> Iterator[None]:
    """Models this small only wait for further threads, the longer the busier the machine."""
    if name != "torch":
        yield
        return
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def backend() -> Iterator[ml.Backend]:
    """NumPy's, where a file or a folder does not say another."""
    with ml.open_backend("numpy") as backend:
        yield backend


@pytest.fixture
def numpy_backend() -> Iterator[ml.Backend]:
    with ml.open_backend("numpy") as backend:
        yield backend


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    """``make_model(**config)`` writes a small model with random weights and a byte-level tokenizer."""
    counter = iter(range(100))

    def make(tensors: dict[str, np.ndarray] | None = None, **overrides: Any) -> Path:
        folder = tmp_path / f"model{next(counter)}"
        folder.mkdir()
        config = {**CONFIG, **overrides}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        save_tokenizer(folder)
        save_weights(folder, config, tensors or {})
        return folder

    return make


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, make_model: Callable[..., Path], numpy_backend: ml.Backend) -> Any:
    """A random model of 256 positions: full attention, sliding windows, recurrent layers."""
    return load_model(make_model(**KINDS[request.param]), numpy_backend)


@pytest.fixture
def small(make_model: Callable[..., Path], numpy_backend: ml.Backend) -> Any:
    return load_model(make_model(), numpy_backend)


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 259,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
}


def save_tokenizer(folder: Path) -> None:
    """259 tokens: <pad>, <s>, </s> and one for each byte; <s> comes first in every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    special = ["<pad>", "<s>", "</s>"]
    vocab = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))


def save_weights(folder: Path, config: dict[str, Any], replaced: dict[str, np.ndarray]) -> None:
    from safetensors.numpy import save_file

    from kvcache_engine.models.families import expected_shapes, parse_config

    random = np.random.default_rng(7)
    tensors = {
        name: (random.normal(size=shape) * (0.3 if len(shape) > 1 else 0.1) + (len(shape) == 1)).astype(
            np.float32
        )
        for name, shape in expected_shapes(parse_config(config)).items()
    }
    save_file({**tensors, **replaced}, folder / "model.safetensors")


@pytest.fixture
def interrupt_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Ctrl-C while the engine is about to take its n-th step from now on."""
    from kvcache_engine.engine import Engine

    def interrupt(number: int) -> None:
        step, count = Engine.step, 0

        def interrupted(self: Engine) -> Any:
            nonlocal count
            count += 1
            if count == number:
                signal.raise_signal(signal.SIGINT)
            return step(self)

        monkeypatch.setattr(Engine, "step", interrupted)

    return interrupt


# Plugins of third parties: installed into a folder, and held to the shipped suites in a process of their own.

SAMPLE = """
import os
import pytest

@pytest.hookimpl(trylast=True)  # of those that -k chooses
def pytest_collection_modifyitems(items):
    step = int(os.environ["ML_SAMPLE"])
    items[:] = [item for i, item in enumerate(items) if i % step == 0]
"""


@dataclass(frozen=True)
class PluginFolder:
    """A folder on the path of the processes that it starts."""

    path: Path

    def install(self, project: Path) -> None:
        """``pip install --target``, without the network."""
        options = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(self.path)]
        self.run([sys.executable, "-m", "pip", "install", "--quiet", *options, str(project)])

    def run(self, command: list[str], sample: int = 1, cwd: Path | None = None) -> str:
        """The output of a command that succeeds; of the tests that it collects, one in ``sample`` runs."""
        (self.path / "ml_sample.py").write_text(SAMPLE, encoding="utf-8")
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "ML_"))}
        options = "-p ml_sample -p no:cacheprovider -p no:xdist -W error -q --tb=short"
        environment = {"PYTHONPATH": str(self.path), "PYTEST_ADDOPTS": options, "ML_SAMPLE": str(sample)}
        done = subprocess.run(
            command,
            env={**clean, **environment},
            cwd=cwd or self.path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
        return done.stdout


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> PluginFolder:
    return PluginFolder(tmp_path_factory.mktemp("plugins"))
