"""Where ``kvcache generate`` takes its prompts from: options, files, and standard input."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

from kvcache_engine.command.prompts import gathered, text_or_stdin
from kvcache_engine.errors import RequestError

from .cli_rig import run


def prompts(*arguments: object, text: str = "") -> list[str]:
    """What ``kvcache generate`` takes for its prompts."""
    result = run("generate", *arguments, "--max-tokens", 1, "--json", text=text)
    assert result.exit_code == 0, result.stderr
    return [answer["prompt"] for answer in json.loads(result.stdout)["outputs"]]


def test_a_pipe_is_the_prompt_where_none_is_named() -> None:
    assert prompts(text="In the beginning\nGod created\n\n") == ["In the beginning\nGod created"]


def test_a_dash_is_standard_input(tmp_path: Path) -> None:
    assert prompts("--prompt", "-", text="In the\n") == ["In the"]
    assert prompts("--prompt-file", "-", text="In the\r\n") == ["In the"]
    assert prompts("--prompt-lines", "-", text="In the\n\nAnd God\n") == ["In the", "And God"]
    assert prompts("--prompt", "And", "--prompt", "-", text="In the\n") == ["And", "In the"]


def test_files_are_prompts_whole_or_line_by_line(tmp_path: Path) -> None:
    one, many = tmp_path / "one.txt", tmp_path / "many.txt"
    one.write_text("\ufeffIn the beginning,\nthe Wörd\n", encoding="utf-8")
    many.write_bytes("\ufeffAnd\fGod\u2028said\r\n  \r\nAnd he\n".encode())
    found = prompts("--prompt-lines", many, "--prompt-file", one, "--prompt", "First")
    assert found == ["First", "In the beginning,\nthe Wörd", "And\fGod\u2028said", "And he"]


def test_save_and_load_read_standard_input_too(tmp_path: Path) -> None:
    path = tmp_path / "c.kv"
    result = run("save", "--prompt", "-", "--out", path, "--json", text="And God said\n")
    assert json.loads(result.stdout)["saved"]["tokens"] == 4
    result = run("load", path, "--prompt", "-", "--max-tokens", 1, "--json", text=" unto Noah,\n")
    assert json.loads(result.stdout)["outputs"][0]["prompt"] == "And God said unto Noah,"


def test_lines_without_anything_are_wrong_usage() -> None:
    """As no pipe is."""
    result = run("generate", text="\n\n")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "missing prompt: give --prompt TEXT, --prompt-file FILE or a pipe" in result.stderr


def test_a_terminal_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def read(self, size: int | None = -1, /) -> str:
            raise AssertionError("it was read")

    monkeypatch.setattr(sys, "stdin", Terminal())
    assert gathered([], [], []) == []


def test_a_text_is_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert text_or_stdin("--") == "--"
    assert gathered(["", "a\n"], [], []) == ["", "a\n"]
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with pytest.raises(RequestError, match="is empty"):
        text_or_stdin("-")
