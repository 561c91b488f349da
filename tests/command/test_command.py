"""The ``kvcache`` command: what it prints, where, and with which exit code."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from rich.console import Console

import kvcache_engine.command.main
import ml
from kvcache_engine.command.backends import Surveyed, listing, plain, survey
from kvcache_engine.engine import Engine

from .cli_held import KVCACHE, piped
from .cli_rig import run

Make = Callable[..., Path]
ROOT = Path(__file__).resolve().parents[2]


def typed(words: str) -> Any:
    """What a whole command line ends with."""
    return run(*shlex.split(words))


def ended(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False, **options)


def test_generate_on_stories_prints_the_known_text(stories: Path, stories_text: str) -> None:
    result = run("generate", "--model", stories, "--prompt", "", "--max-tokens", 200, "--prefill-chunk", 7)
    assert result.exit_code == 0, result.stderr
    text, summary = result.stdout.split("\n\ntokens reused")
    assert text == stories_text
    assert result.stderr == ""
    for line in ("tokens computed   1", "tokens generated  200", "prefill", "decode", "tokens/s", "cache"):
        assert line in summary


def test_the_text_follows_its_prompt_and_stops(stories: Path) -> None:
    result = typed(f"generate --model {stories} --prompt 'Once upon a' --max-tokens 99 --stop girl --stop x")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("Once upon a time, there was a little \n\ntokens reused")


def test_several_prompts_are_labelled_and_shared(stories: Path) -> None:
    prompts = "--prompt 'Once upon a time' --prompt 'Once upon a'"
    result = typed(f"generate --model {stories} {prompts} --max-tokens 5")
    assert result.exit_code == 0, result.stderr
    assert "[1] Once upon a time, there" in result.stdout
    assert "[2] Once upon a time" in result.stdout
    assert "tokens reused     3" in result.stdout


def test_json_is_one_object(make_model: Make) -> None:
    rest = "--max-tokens 6 --temperature 0.9 --seed 3 --top-k 40 --top-p 0.9 --json"
    words = f"generate --model {make_model()} {rest} --prompt abc"
    result = typed(f"{words} --prompt abd")
    assert result.exit_code == 0, result.stderr
    record = json.loads(result.stdout)
    assert record["backend"] == "numpy"
    assert record["dtype"] == "F32"
    first, second = record["outputs"]
    assert (first["prompt"], first["prompt_tokens"], first["reused"], first["computed"]) == ("abc", 4, 0, 4)
    assert (second["reused"], second["computed"]) == (3, 1)
    assert record["statistics"]["reused_tokens"] == 3
    assert record["statistics"]["cache_bytes"] > 0
    again = json.loads(typed(words).stdout)
    assert again["outputs"][0]["text"] == first["text"]


@pytest.mark.parametrize("dtype", ["f32", "F16", "bf16"])
def test_dtypes(make_model: Make, dtype: str) -> None:
    arguments = ("--dtype", dtype, "--cache-dtype", "bf16", "--max-tokens", 2, "--json")
    result = run("generate", "--model", make_model(), "--prompt", "a", *arguments)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["dtype"] == dtype.upper()


@pytest.mark.parametrize(
    ("options", "key", "value"),
    [
        ("--cache-dtype q8_0", 34 / 32, 34 / 32),
        ("--cache-type-k F8_E4M3 --cache-type-v q4_0", 68 / 64, 18 / 32),
        ("--cache-type-v affine4_64", 4, 0.5 + 8 / 64),
        ("--cache-dtype f16 --cache-type-k bf16", 2, 2),
    ],
)
def test_keys_and_values_have_types_of_their_own(
    make_model: Make, options: str, key: float, value: float
) -> None:
    words = f"generate --model {make_model(head_dim=64)} --prompt abc --max-tokens 2 --json"
    sizes = []
    for more in ("", options):
        result = typed(f"{words} {more}")
        assert result.exit_code == 0, result.stderr
        sizes.append(json.loads(result.stdout)["statistics"]["cache_bytes"])
    assert sizes[1] / sizes[0] == (key + value) / 8


def test_without_the_bundled_model_another_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("kvcache_engine.loading.__file__", str(tmp_path / "loading.py"))
    result = run("generate", "--prompt", "x")
    assert result.exit_code == 1
    assert "name another with --model" in result.stderr


@pytest.mark.parametrize(
    ("options", "env"), [(["--backend", "abacus"], {}), ([], {"ML_BACKEND": "abacus"})], ids=["named", "env"]
)
def test_an_unknown_backend_says_how_to_install_the_others(
    make_model: Make, options: list[str], env: dict[str, str]
) -> None:
    result = run("generate", "--model", make_model(), "--prompt", "x", *options, env=env)
    assert result.exit_code == 1
    assert "no backend 'abacus'" in result.stderr
    for info in ml.available_backends():
        if info.install_hint:
            assert info.name in result.stderr
            assert " ".join(info.install_hint.split()) in result.stderr


FAILING: dict[str, list[object]] = {
    "generate": ["--prompt", "x", "--model", "/no/such/model"],
    "chat": ["--model", "/no/such/model"],
    "save": ["--prompt", "x", "--out", "/no/such/folder/c.kv"],
    "load": ["/no/such/file.kv"],
    "inspect": ["/no/such/store"],
    "bench": ["--backend", "abacus"],
    "conformance": ["--backend", "abacus"],
}


@pytest.mark.parametrize(
    ("name", "option"),
    [(name, []) for name in FAILING] + [(name, ["--json"]) for name in FAILING if name != "chat"],
)
def test_every_command_says_an_error_in_one_line_and_shows_the_trace_with_debug(
    name: str, option: list[str]
) -> None:
    quiet, loud = run(name, *FAILING[name], *option), run(name, *FAILING[name], *option, "--debug")
    for result in (quiet, loud):
        assert (result.exit_code, result.stdout) == (1, "")
    assert quiet.stderr.startswith("kvcache: ")
    assert quiet.stderr.count("\n") == 1
    assert "Traceback" in loud.stderr
    assert loud.stderr.endswith(quiet.stderr)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("odd\nthing"), "kvcache: RuntimeError: odd thing; --debug shows the traceback\n"),
        (MemoryError(), "kvcache: out of memory; use a smaller --capacity or a narrower --dtype\n"),
        (ml.DeviceError("no kernel"), "kvcache: no kernel\n"),
    ],
)
def test_failures_while_generating(
    make_model: Make, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(*_: object) -> Any:
        raise error

    monkeypatch.setattr(Engine, "step", fail)
    result = run("generate", "--model", make_model(), "--prompt", "x")
    assert (result.exit_code, result.stderr) == (1, message)


# Where the output goes.


@pytest.mark.skipif(os.name == "nt", reason="needs a shell")
def test_a_reader_that_goes_away_ends_the_command_without_a_trace(stories: Path) -> None:
    words = "generate", "--model", stories, "--prompt", "Once", "--max-tokens", 500
    with piped(*KVCACHE, *words) as process:
        assert process.stdout.read(4) == "Once"
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


@pytest.mark.skipif(os.name == "nt", reason="needs a shell")
@pytest.mark.parametrize("words", ["generate --prompt x >&-", "chat <&-"])
def test_without_a_standard_stream_it_runs(words: str, make_model: Make) -> None:
    done = ended("sh", "-c", f"{shlex.join(KVCACHE)} {words} --model {make_model()}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# The command itself.


def test_as_a_module_and_without_a_framework(make_model: Make) -> None:
    """The whole command on NumPy imports no other framework."""
    code = (
        "import runpy, sys\n"
        f"sys.argv[1:] = ['generate', '--model', {str(make_model())!r}, '--prompt', 'x']\n"
        "try: runpy.run_module('kvcache_engine', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as e: assert not e.code, e.code\n"
        "found = {'torch', 'mlx', 'cupy', 'jax', 'transformers'} & set(sys.modules)\n"
        "assert not found, found"
    )
    done = ended(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("x")


@pytest.mark.parametrize(("name", "default"), [("OMP_WAIT_POLICY", "passive"), ("THP_MEM_ALLOC_ENABLE", "1")])
@pytest.mark.parametrize("given", [None, "other"])
def test_pytorch_is_set_up_unless_the_environment_says_otherwise(
    name: str, default: str, given: str | None
) -> None:
    """From before anything is imported: here the command gets no further."""
    code = (
        "import atexit, os, sys; from kvcache_engine.command.main import main; sys.modules['typer'] = None; "
        f"atexit.register(lambda: print(os.environ[{name!r}])); main()"
    )
    others = {one: value for one, value in os.environ.items() if one != name}
    done = ended(sys.executable, "-c", code, env=others | ({name: given} if given else {}))
    assert done.stdout.strip() == (given or default), done.stderr


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_one_line_says_what_to_install(missing: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None\nfrom kvcache_engine.command.main import main\nmain()"
    )
    done = ended(sys.executable, "-c", code)
    assert done.returncode == 1
    told = "is not installed; the command needs: pip install 'ml-kvcache[engine]'"
    assert done.stderr == f"kvcache: {missing} {told}\n"


def test_cli_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = kvcache_engine.command.main.nonsense


def test_backends_lists_them_all() -> None:
    infos = ml.available_backends()
    result = run("backends")
    assert result.exit_code == 0
    blocks = blocks_of(result.stdout)
    assert list(blocks) == [info.name for info in infos]
    for info in infos:
        assert f"priority {info.priority}" in blocks[info.name]
        assert (info.version or "") in blocks[info.name]
    block = blocks["numpy"]
    assert "devices       cpu" in block
    assert "GiB free of" in block
    assert "dtypes        F32 F16 BF16 I8 U8 I32 I64 BOOL" in block
    assert "SupportsRaggedAttention\n" in block.partition("capabilities  ")[2]
    assert all(line == line.rstrip() for line in result.stdout.splitlines())


def blocks_of(text: str) -> dict[str, str]:
    """The lines of each backend, by its name."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name = line.split()[0] if line[0] != " " else list(found)[-1]
        found[name] = f"{found.get(name, '')}{line}\n"
    return found


def test_backends_as_json_with_what_each_is_capable_of() -> None:
    rows = {row["name"]: row for row in json.loads(run("backends", "--json").stdout)}
    assert set(rows["numpy"]) == {
        "name", "available", "reason", "version", "devices", "priority", "install_hint",
        "dtypes", "absent", "error", "memory", "capabilities",
    }  # fmt: skip
    (memory,) = rows["numpy"]["memory"]
    assert (memory["device"], memory["allocated"]) == ("cpu", 0)
    assert 0 < memory["free"] <= memory["total"]
    assert rows["numpy"]["absent"] == []
    kinds = [getattr(ml, kind) for kind in ml.__all__ if kind.startswith("Supports")]
    for name in (name for name, row in rows.items() if row["available"]):
        with ml.open_backend(name) as backend:
            expected = [kind.__name__ for kind in kinds if isinstance(backend, kind)]
        assert "SupportsHostMemory" in expected
        assert rows[name]["capabilities"] == expected


def test_backends_that_cannot_run_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    info = ml.BackendInfo("abacus", False, "no\nbeads", None, (), 3, "pip install beads")
    monkeypatch.setattr(ml, "available_backends", lambda: (info,))
    lines = run("backends").stdout.splitlines()
    assert lines == [
        "abacus  priority 3, cannot run here",
        "  why           no beads",
        "  install       pip install beads",
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_backends_fit_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = ml.BackendInfo("abacus", False, "no beads, " * 30, None, (), 3, "pip install beads")
    monkeypatch.setattr(ml, "available_backends", lambda real=ml.available_backends: (*real(), absent))
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(listing(survey()))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= width
    why = next(i for i, line in enumerate(lines) if line.endswith("priority 3, cannot run here")) + 1
    assert lines[why].startswith("  why           no beads, no beads")
    assert lines[why + 1].startswith(f"{'':16}"), "what is wrapped stays in its column"
    assert any("dtypes        F32 F16 BF16 I8 U8 I32 I64 BOOL" in line for line in lines)


def test_backends_tell_memory_that_is_known_in_part() -> None:
    info = ml.BackendInfo("abacus", True, "", "1", ("rod:0",), 3, "")
    sizes = [(2**30, 2**31), (2**30, None), (None, 2**31), (None, None)]
    row = Surveyed(info, memory=tuple(ml.DeviceMemory("rod:0", 0, *size) for size in sizes))
    shown = [line.split("rod:0: ")[1] for line in plain([row]) if "memory" in line]
    assert shown == [
        "1.0 GiB free of 2.0 GiB", "1.0 GiB free", "2.0 GiB, free memory unknown", "unknown"
    ]  # fmt: skip
