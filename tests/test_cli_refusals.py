"""What someone who is new here gets wrong is told in one line that says what to do, and nothing is harmed."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

import kvcache.command.main

ROOT = Path(__file__).resolve().parents[1]
SAVE = ["save", "--prompt", "And God said", "--out"]


def run(*arguments: object, text: str = "") -> Any:
    return CliRunner().invoke(kvcache.command.main.app, [str(argument) for argument in arguments], input=text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*SAVE, "."], "kvcache: .: is a folder; give a file"),
        ([*SAVE, "no/such.kv"], "kvcache: no/such.kv: there is no folder no to write it to"),
        (["inspect", "valkey://localhost"], "valkey://localhost: only a store in a folder can"),
        (["inspect", "{file}"], "{file}: damaged, or not a saved conversation"),
        (["load", "{file}"], "{file}: damaged, or not a saved conversation"),
        (["load", "."], ".: cannot be read (Is a directory)"),
        (["chat", "--store", "{file}"], "--store {file}: is a file; --store must be a folder"),
        (["generate", "--model", "{file}", "--prompt", "x"], "{file}: a model must be a folder"),
        (["generate", "--prompt-file", "{file}x"], "{file}x: cannot be read"),
        (["serve", "--tenant-budget", "/"], "serve: --tenant-budget is '/'; it must have a size"),
    ],
)
def test_what_cannot_be_had(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("no conversation")
    monkeypatch.chdir(tmp_path)
    result = run(*(argument.format(file=file) for argument in arguments))
    assert (result.exit_code, result.stdout) == (1, "")
    assert message.format(file=file) in result.stderr
    assert result.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    "words", ["chat --store ", "serve --store a --store=", "serve --tenant-budget ", "generate --model "]
)
def test_an_empty_value_is_refused_by_name(words: str) -> None:
    command, *_, option = words.replace("=", " ").split()
    result = run(*words.split(" "))
    assert (result.exit_code, result.stdout) == (2, "")
    told = f"{option} is empty; give a value, or omit the option"
    assert result.stderr == f"kvcache {command}: {told}\n"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_a_device_or_a_pipe_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    result = run(*SAVE, pipe)
    assert result.exit_code == 1
    assert result.stderr == f"kvcache: {pipe}: is a device or a pipe; give a regular file\n"
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    chat = run("chat", "--max-tokens", 2, text=f"And God said\n/save {pipe}\n/save {tmp_path}\n").stdout
    assert "is a device or a pipe" in chat
    assert "is a folder" in chat
    assert list(tmp_path.iterdir()) == [pipe]


@pytest.mark.parametrize("command", ["", "generate", "chat", "inspect"])
def test_h_is_help(command: str) -> None:
    arguments = [command] if command else []
    short, long = (run(*arguments, option) for option in ("-h", "--help"))
    assert (short.exit_code, short.stdout) == (0, long.stdout)
    assert "Usage: kvcache" in " ".join(short.stdout.split())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("line", ["--version", "generate --prompt x --max-tokens 1", "chat"])
def test_an_output_on_a_full_device_is_one_line(line: str) -> None:
    words = [sys.executable, "-m", "kvcache", *line.split()]
    options = {"input": "/list\n", "stderr": subprocess.PIPE, "text": True, "cwd": ROOT, "timeout": 60}
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(words, stdout=full, check=False, **options)
    expected = "kvcache: the output cannot be written (No space left on device)\n"
    assert (ended.returncode, ended.stderr) == (1, expected)


CUT = "the model supports up to 256"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--capacity", 40], f"the text was cut short; --capacity is 40 tokens, and {CUT}"),
        (["--capacity", 40, "--prompt", "y", "--json"], "texts that were cut short: 1; --capacity is 40"),
        ([], f"the text was cut short; {CUT} tokens"),
    ],
)
def test_a_text_that_is_cut_short_for_want_of_room_says_so(
    arguments: list[object], told: str, make_model: Callable[..., Path]
) -> None:
    prompt = "x" * (35 if arguments else 250)
    count = 20 if arguments else 50
    result = run("generate", "--model", make_model(), "--prompt", prompt, "--max-tokens", count, *arguments)
    assert result.exit_code == 0
    assert result.stderr.startswith(f"kvcache: {told}")
    assert result.stderr.count("\n") == 1
