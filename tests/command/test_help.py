"""``kvcache --help`` and the shell's completion: an example for each command, and what may come next."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("typer")

import typer
from typer.testing import CliRunner

import kvcache_engine.command.main
import ml
from kvcache.stores import open_store
from kvcache_engine.command import completing
from kvcache_engine.command.options import named_store
from kvcache_engine.command.usage import ORDER

from .cli_rig import run

ROOT = Path(__file__).resolve().parents[2]
GROUP: Any = typer.main.get_command(kvcache_engine.command.main.app)
NAMES = sorted(GROUP.commands)


# Help.


def test_the_commands_are_listed_in_the_order_of_use() -> None:
    shown = run("--help", env={"COLUMNS": "100"}).stdout
    places = [shown.index(f"│ {name} ") for name in ORDER]
    assert places == sorted(places)
    assert set(ORDER) <= set(NAMES)
    assert "Example: kvcache generate" in shown


def test_kvcache_alone_shows_its_help() -> None:
    result = run(env={"COLUMNS": "100"})
    assert result.exit_code == 2
    assert "Commands" in result.stdout + result.stderr


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_an_example_whose_options_exist(name: str) -> None:
    shown = run(name, "--help", env={"COLUMNS": "200"}).stdout
    examples = re.findall(r"Example: (kvcache .*?)\s*$", shown, re.MULTILINE)
    assert len(examples) == 1
    program, command, *arguments = shlex.split(examples[0])
    assert (program, command) == ("kvcache", name)
    GROUP.commands[name].make_context(name, arguments)  # parses them all, and raises for what is wrong


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_debug_and_every_option_says_what_it_is(name: str) -> None:
    options = {text: param for param in GROUP.commands[name].params for text in param.opts}
    assert "--debug" in options
    assert all(param.help for param in GROUP.commands[name].params)


@pytest.mark.parametrize("name", ["chat", "serve"])
def test_help_says_how_to_limit_the_folder_of_a_store(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xxhash")
    monkeypatch.chdir(tmp_path)
    (url,) = re.findall(r"file:\S+", run(name, "--help", env={"COLUMNS": "300"}).stdout)
    with cast(Any, open_store(named_store(url))) as store:
        assert (store.path, store.budget) == (tmp_path / "kept", 64 << 20)


@pytest.mark.parametrize("name", [*NAMES, ""])
def test_help_fits_narrow_terminals(name: str) -> None:
    result = run(*filter(None, [name]), "--help", env={"COLUMNS": "20"})
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 20


# Completion.


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A saved conversation, a store, a folder, a file that is neither, and a pipe."""
    pytest.importorskip("xxhash")
    result = run("save", "--prompt", "And God said", "--out", tmp_path / "noah.kv", "--quiet")
    assert result.exit_code == 0, result.stderr
    open_store((tmp_path / "nest").as_uri()).close()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes.txt").write_text("no conversation")
    (tmp_path / "notes.bin").write_bytes(b"\xff" * 64)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "npipe")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_backends_are_completed_without_opening_one() -> None:
    names = [name for name, _ in completing.backend_names("")]
    assert names == sorted(info.name for info in ml.available_backends())
    assert [name for name, _ in completing.backend_names("nu")] == ["numpy"]


def test_conversations_and_stores_are_told_from_other_files(folder: Path) -> None:
    assert completing.conversations("") == ["noah.kv"]
    assert completing.conversations("n") == ["noah.kv"]
    assert completing.conversations("x") == []
    assert completing.conversations(f"{folder}/no") == [f"{folder}/noah.kv"]
    assert completing.conversations("/no/such/") == []
    assert completing.stores_and_conversations("n") == ["nest", "noah.kv"]
    assert completing.stores("n") == ["nest"]
    assert {"file://", "memory://"} <= set(completing.stores(""))


def completed(line: str) -> list[str]:
    """What bash is told for the last word of a line."""
    words = line.split(" ")
    env = {"_KVCACHE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    result = CliRunner().invoke(kvcache_engine.command.main.app, [], prog_name="kvcache", env=env)
    assert result.exit_code == 0
    return sorted(result.stdout.split())


def test_the_shell_is_told_commands_options_and_values(folder: Path) -> None:
    assert completed("kvcache ") == NAMES
    assert completed("kvcache gen") == ["generate"]
    assert "--prompt-file" in completed("kvcache generate --pr")
    assert completed("kvcache generate --dtype b") == ["bf16"]
    for option in ("--cache-dtype", "--cache-type-k", "--cache-type-v"):
        assert completed(f"kvcache generate {option} q") == ["q4_0", "q8_0"]
    assert completed("kvcache load ") == ["noah.kv"]
    assert completed("kvcache inspect n") == ["nest", "noah.kv"]
    assert completed("kvcache chat --store ne") == ["nest"]
    for name in ("generate", "chat", "save", "load", "inspect", "conformance", "bench"):
        assert "numpy" in completed(f"kvcache {name} --backend ")
