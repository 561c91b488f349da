"""Ctrl-C at any moment of ``kvcache``: a short message, exit code 130, and nothing half-done."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from kvcache_engine.saved import read

from .cli_held import held
from .cli_rig import run

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send to one process")

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "And God said unto Noah,"

OPENING = "ml:open_backend:1"
LOADING = "kvcache_engine.weights:Loader.take:5"
PREFILL = "kvcache.caches.causal:CausalCache.start_forward:1"
DECODE = "kvcache.caches.causal:CausalCache.start_forward:3"
READING = "kvcache_engine.saved:digest_of_snapshot:1"
RESTORE = "kvcache_engine.saved:deserialize:1"
WRITING = "os:fsync:1"

At = Callable[..., None]


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> At:
    """``at(moment)``: a signal comes where a function is called for the nth time (module:function:n)."""

    def signal_at(moment: str, number: signal.Signals = signal.SIGINT) -> None:
        module, path, call = moment.split(":")
        owner: Any = importlib.import_module(module)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        real, left = getattr(owner, name), int(call)

        def interrupted(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if not left:
                signal.raise_signal(number)
            return real(*args, **options)

        monkeypatch.setattr(owner, name, interrupted)

    return signal_at


def interrupted(*arguments: object) -> str:
    """What the command says on stderr when Ctrl-C comes."""
    result = run(*arguments)
    assert result.exit_code == 130, result.stderr
    assert result.stderr.count("\n") == 1
    return str(result.stderr).strip()


@pytest.mark.parametrize(
    ("moment", "message"),
    [
        (OPENING, "interrupted"),
        (LOADING, "interrupted while loading the model"),
        (PREFILL, "interrupted after 0 tokens; the cache is released"),
        (DECODE, "interrupted after 2 tokens; the cache is released"),
    ],
    ids=["opening", "loading", "prefill", "decode"],
)
def test_generate_ends_with_a_short_message(moment: str, message: str, at: At) -> None:
    at(moment)
    assert interrupted("generate", "--prompt", PROMPT) == f"kvcache: {message}"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
def test_a_batch_shows_what_there_is_of_its_answers(
    options: list[str], number: signal.Signals, at: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is whole by then."""
    prompts = ["In the beginning", "And God said unto"]
    words = [word for prompt in prompts for word in ("--prompt", prompt)]
    whole = run("generate", *words, "--stop", ",", "--max-tokens", 20, "--json")
    expected = [output["text"] for output in json.loads(whole.stdout)["outputs"]]
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # as main sets it
    at("kvcache.caches.causal:CausalCache.start_forward:5", number)
    try:
        ended = run("generate", *words, "--stop", ",", "--max-tokens", 20, *options)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.exit_code == 128 + number, ended.stderr
    if options:
        outputs = json.loads(ended.stdout)["outputs"]
        texts = [output["text"] for output in outputs]
        assert [output["reason"] for output in outputs] == ["interrupted", "stop"]
    else:
        blocks = ended.stdout.split("\n\n")
        assert len(blocks) == 3
        texts = [block.removeprefix(f"[{i + 1}] {prompts[i]}") for i, block in enumerate(blocks[:2])]
        texts[0], stopped = texts[0].split("\n")
        assert stopped == "[stopped after 4 tokens]"
    assert texts[1] == expected[1]
    assert texts[0] == expected[0][: len(texts[0])] != expected[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "noah.kv"
    assert run("save", "--prompt", PROMPT, "--out", path, "--quiet").exit_code == 0
    return path


@pytest.mark.parametrize("moment", [LOADING, DECODE, WRITING], ids=["loading", "decode", "writing"])
def test_save_leaves_the_file_that_was_there(moment: str, at: At, tmp_path: Path, saved: Path) -> None:
    path = tmp_path / "noah.kv"
    path.write_bytes(saved.read_bytes())
    at(moment)
    message = interrupted("save", "--prompt", "x", "--max-tokens", 4, "--out", path)
    assert message == "kvcache: interrupted; nothing was saved"
    assert list(tmp_path.iterdir()) == [path], "no temporary file is left"
    assert read(path).tokens == read(saved).tokens


@pytest.mark.parametrize("moment", [READING, RESTORE, DECODE], ids=["reading", "restore", "decode"])
def test_load_leaves_the_file_and_writes_none(moment: str, at: At, tmp_path: Path, saved: Path) -> None:
    before = saved.read_bytes()
    at(moment)
    message = interrupted("load", saved, "--max-tokens", 9, "--out", tmp_path / "more.kv")
    assert message.startswith("kvcache: interrupted")
    assert saved.read_bytes() == before
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("moment", "arguments"),
    [
        ("typer.core:TyperGroup.make_context:1", ["generate", "--prompt", PROMPT]),
        ("kvcache.testing.bench.decoding:interleave:1", ["bench", "--quick"]),
        ("ml.plugins:Registry.infos:1", ["backends", "--json"]),
        (DECODE, ["inspect", "--prompt", PROMPT, "--html", "page.html"]),
    ],
    ids=["parsing", "bench", "backends", "inspect"],
)
def test_any_other_moment_ends_with_a_short_message(
    moment: str, arguments: list[str], at: At, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    at(moment)
    assert interrupted(*arguments) == "kvcache: interrupted"
    assert not list(tmp_path.iterdir())


# In processes of their own: the start, the end, and processes of theirs.

STARTING = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits it ignored
from kvcache_engine.command.main import main

class Interrupting:
    left = int(sys.argv[1])

    def find_spec(self, *ignored):
        Interrupting.left -= 1
        if not Interrupting.left:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
sys.argv = ["kvcache", *sys.argv[2:]]
main()
"""
"""Runs the command, and interrupts it where it imports its nth module."""


def started(code: str, *arguments: object, path: Path = ROOT) -> tuple[int, str, str]:
    line = [sys.executable, "-c", code, *map(str, arguments)]
    settings = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}"}
    ended = subprocess.run(
        line, capture_output=True, text=True, cwd=ROOT, env=settings, check=False, timeout=60
    )
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize("imports", [1, 20, 320])
def test_the_start_ends_with_a_short_message_whatever_is_being_imported(imports: int) -> None:
    assert started(STARTING, imports, "backends", "--json") == (130, "", "kvcache: interrupted\n")


def test_a_module_that_swallows_every_exception_does_not_swallow_the_interruption(tmp_path: Path) -> None:
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich" / "__init__.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
    )
    assert started(STARTING, 0, "backends", path=tmp_path) == (130, "", "kvcache: interrupted\n")


def test_the_end_of_the_process_ends_with_a_short_message_behind_the_whole_result() -> None:
    at_exit = "import atexit, os, signal\natexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))\n"
    code, out, errors = started(at_exit + STARTING, 0, "--version")
    assert (code, errors) == (130, "kvcache: interrupted\n")
    assert out.count("\n") == 1


def test_a_job_in_the_background_is_not_interrupted() -> None:
    ignoring = STARTING.replace("signal.default_int_handler", "signal.SIG_IGN")
    assert started(ignoring, 40, "--version")[::2] == (0, "")


def test_chat_in_a_pipe_ends_at_a_second_ctrl_c_and_its_store_is_whole(tmp_path: Path) -> None:
    pytest.importorskip("xxhash")
    store = tmp_path / "store"
    with held(DECODE, tmp_path, "chat", "--store", store, text=f"{PROMPT}\n") as process:
        for _ in range(2):  # one stops the answer, which waits for the pass; the second one ends that
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, "kvcache: interrupted\n")
    again = run("chat", "--store", store, "--max-tokens", 2, text=f"{PROMPT}\n/quit\n")
    assert again.exit_code == 0, again.stderr
    listed = run("inspect", store, "--json")
    assert listed.exit_code == 0
    assert not any(entry["problem"] for entry in json.loads(listed.stdout)["entries"])


def test_conformance_ends_its_pytest_too(tmp_path: Path) -> None:
    moment = "ml.testing.results:_followed:1"
    with held(moment, tmp_path, "conformance", "--backend", "numpy", "-k", "casts") as process:
        child = int((tmp_path / "marker").read_text())
        os.kill(child, 0)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, "kvcache: interrupted before the first test\n")
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "path",
    [
        "ml.base.backend:Storage",
        "kvcache.snapshots.snapshot:InCache",
        "kvcache.stores.streams:FileReader",
        "kvcache.stores.index:Index",
        "kvcache.stores.folder:Folder",
        "backends.mlx.storage:MlxStorage",
        "kvcache.integrations.mlx_lm.rows:BatchRows",
    ],
)
def test_what_an_interrupt_leaves_without_its_fields_is_dropped_without_a_word(path: str) -> None:
    module, name = path.split(":")
    owner = getattr(pytest.importorskip(module), name)
    owner.__new__(owner)
