"""Ctrl-C at any moment of ``kvcache``: a short message, exit code 130, and nothing half-done.

Each command is a process of its own, held at a moment of its work until the signal has come.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from kvcache.runner.saved import read

from .cli_held import held

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send to one process")

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "And God said unto Noah,"

OPENING = "ml:open_backend:1"
LOADING = "kvcache.runner.weights:Loader.take:5"
PREFILL = "kvcache.caches.causal:CausalCache.start_forward:1"
DECODE = "kvcache.caches.causal:CausalCache.start_forward:3"
READING = "kvcache.runner.saved:digest_of_snapshot:1"
RESTORE = "kvcache.runner.saved:deserialize:1"
WRITING = "os:fsync:1"


def interrupted(moment: str, tmp_path: Path, *arguments: object) -> str:
    """What the command says on stderr when Ctrl-C comes at ``moment``."""
    with held(moment, tmp_path, *arguments) as process:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert errors.count("\n") == 1
    return errors.strip()


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
def test_generate_ends_with_a_short_message(moment: str, message: str, tmp_path: Path) -> None:
    assert interrupted(moment, tmp_path, "generate", "--prompt", PROMPT) == f"kvcache: {message}"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
def test_a_batch_shows_what_there_is_of_its_answers(
    options: list[str], number: signal.Signals, tmp_path: Path
) -> None:
    """The second is whole by then."""
    prompts = ["In the beginning", "And God said unto"]
    words = [word for prompt in prompts for word in ("--prompt", prompt)]
    arguments = ["generate", *words, "--stop", ",", "--max-tokens", 20, *options]
    with held("kvcache.caches.causal:CausalCache.start_forward:5", tmp_path, *arguments) as process:
        process.send_signal(number)
        out, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + number, errors
    whole = run("generate", *words, "--stop", ",", "--max-tokens", 20, "--json")
    expected = [output["text"] for output in json.loads(whole.stdout)["outputs"]]
    if options:
        outputs = json.loads(out)["outputs"]
        texts = [output["text"] for output in outputs]
        reasons = [output["reason"] for output in outputs]
        assert reasons == ["interrupted", "stop"]
    else:
        blocks = out.split("\n\n")
        assert len(blocks) == 3
        texts = [block.removeprefix(f"[{i + 1}] {prompts[i]}") for i, block in enumerate(blocks[:2])]
        texts[0], stopped = texts[0].split("\n")
        assert stopped == "[stopped after 3 tokens]"
    assert texts[1] == expected[1]
    assert texts[0] == expected[0][: len(texts[0])] != expected[0]


STARTING = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits it ignored
from kvcache.command.main import main

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


@pytest.mark.parametrize("imports", [1, 2, 3, 5, 10, 20, 40, 80, 120, 160, 200, 240, 280, 320])
def test_the_start_ends_with_a_short_message_whatever_is_being_imported(imports: int) -> None:
    line = [sys.executable, "-c", STARTING, str(imports), "backends", "--json"]
    ended = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, check=False, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "kvcache: interrupted\n")


def test_a_module_that_swallows_every_exception_does_not_swallow_the_interruption(tmp_path: Path) -> None:
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich" / "__init__.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
    )
    line = [sys.executable, "-c", STARTING, "0", "backends"]
    path = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    ended = subprocess.run(line, capture_output=True, text=True, env=path, check=False, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "kvcache: interrupted\n")


def test_the_end_of_the_process_ends_with_a_short_message_behind_the_whole_result() -> None:
    code = (
        "import atexit, os, signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))\n"
        "import sys; sys.argv = ['kvcache', '--version']\n"
        "from kvcache.command.main import main; main()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (130, "kvcache: interrupted\n")
    assert ended.stdout.count("\n") == 1


def test_a_job_in_the_background_is_not_interrupted() -> None:
    code = STARTING.replace("signal.default_int_handler", "signal.SIG_IGN")
    line = [sys.executable, "-c", code, "40", "--version"]
    ended = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, check=False, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "noah.kv"
    line = ["save", "--prompt", PROMPT, "--out", str(path), "--quiet"]
    subprocess.run([sys.executable, "-m", "kvcache", *line], check=True, cwd=ROOT, timeout=60)
    return path


@pytest.mark.parametrize("moment", [LOADING, DECODE, WRITING], ids=["loading", "decode", "writing"])
def test_save_leaves_the_file_that_was_there(moment: str, tmp_path: Path, saved: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    path = folder / "noah.kv"
    path.write_bytes(saved.read_bytes())
    message = interrupted(moment, tmp_path, "save", "--prompt", "x", "--max-tokens", 4, "--out", path)
    assert message == "kvcache: interrupted; nothing was saved"
    assert list(folder.iterdir()) == [path], "no temporary file is left"
    assert read(path).tokens == read(saved).tokens


@pytest.mark.parametrize("moment", [READING, RESTORE, DECODE], ids=["reading", "restore", "decode"])
def test_load_leaves_the_file_and_writes_none(moment: str, tmp_path: Path, saved: Path) -> None:
    before = saved.read_bytes()
    out = tmp_path / "more.kv"
    message = interrupted(moment, tmp_path, "load", saved, "--max-tokens", 9, "--out", out)
    assert message.startswith("kvcache: interrupted")
    assert saved.read_bytes() == before
    assert not out.exists()


@pytest.mark.parametrize(
    ("moment", "arguments"),
    [
        ("typer.core:TyperGroup.make_context:1", ["generate", "--prompt", PROMPT]),
        ("kvcache.bench.decoding:interleave:1", ["bench", "--quick"]),
        ("ml.plugins:Registry.infos:1", ["backends", "--json"]),
    ],
    ids=["parsing", "bench", "backends"],
)
def test_any_other_moment_ends_with_a_short_message(
    moment: str, arguments: list[str], tmp_path: Path
) -> None:
    assert interrupted(moment, tmp_path, *arguments) == "kvcache: interrupted"


def test_inspect_ends_with_a_short_message(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    message = interrupted(DECODE, tmp_path, "inspect", "--prompt", PROMPT, "--html", page)
    assert message == "kvcache: interrupted"
    assert not page.exists()


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
    assert again.returncode == 0, again.stderr
    listed = run("inspect", store, "--json")
    assert listed.returncode == 0
    assert '"problem": "' not in listed.stdout.replace('"problem": ""', "")


def run(*arguments: object, text: str = "") -> subprocess.CompletedProcess[str]:
    line: Sequence[str] = [sys.executable, "-m", "kvcache", *map(str, arguments)]
    return subprocess.run(line, input=text, capture_output=True, text=True, cwd=ROOT, check=False, timeout=60)


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
