"""``kvcache chat --json``: each line that is said or asked is answered by one object, in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

import kvcache_engine.command.main
from kvcache_engine.command.chat_replies import aligned
from kvcache_engine.saved import read

from .cli_rig import run

NOAH = "And God said unto Noah,"


def chat(*lines: str, arguments: tuple[object, ...] = ()) -> list[dict[str, Any]]:
    """One record for every line; nothing else is written."""
    line = ("chat", "--max-tokens", 6, "--json", *arguments)
    result = run(*line, text="".join(f"{line}\n" for line in lines))
    assert (result.exit_code, result.stderr) == (0, "")
    records: list[dict[str, Any]] = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(records) == sum(bool(line.strip()) for line in lines)
    return records


def test_an_answer_has_what_generate_says_of_it() -> None:
    (answer,) = chat(NOAH)
    generated = run("generate", "--prompt", NOAH, "--max-tokens", 6, "--json").stdout
    (output,) = json.loads(generated)["outputs"]
    assert answer == {"conversation": "main", **output}


def test_every_command_is_answered_and_blank_lines_are_not(tmp_path: Path) -> None:
    pytest.importorskip("xxhash")
    file, page = tmp_path / "noah.kv", tmp_path / "noah.html"
    answer, saved, loaded, forked, new, listed, _, inspected, drawn, live = chat(
        NOAH, f"/save {file}", f"/load {file} two", "/fork three", "/switch four", "", "/list",
        "/switch main", f"/inspect {page}", "/inspect", "/live",
    )  # fmt: skip
    said = len(answer["tokens"]) + answer["prompt_tokens"]
    size = file.stat().st_size
    assert saved == {
        "conversation": "main",
        "command": "/save",
        "saved": {"file": str(file), "tokens": said, "bytes": size},
    }
    assert len(read(file).tokens) == said
    assert loaded == {"conversation": "two", "command": "/load", "file": str(file), "tokens": said}
    assert forked == {"conversation": "three", "command": "/fork", "from": "two", "tokens": said}
    assert new == {"conversation": "four", "command": "/switch", "new": True, "tokens": 0}
    assert [each["name"] for each in listed["conversations"] if each["current"]] == ["four"]
    assert [each["tokens"] for each in listed["conversations"]] == [said, said, said, 0]
    assert inspected["file"] == str(page)
    assert page.exists()
    assert drawn["picture"] == "PrefixPicture"
    assert live["live"] is True


def test_undo_show_stats_help_and_quit() -> None:
    answer, shown, stats, undone, commands, left = chat(NOAH, "/show", "/stats", "/undo", "/help", "/quit")
    assert shown["text"] == NOAH + answer["text"]
    assert undone["taken_back"] == shown["tokens"] == answer["prompt_tokens"] + len(answer["tokens"])
    assert undone["tokens"] == 0
    assert stats["statistics"]["generated_tokens"] == len(answer["tokens"])
    assert set(stats["reused"]) == {"live", "device", "host", "store"}
    assert stats["kept"]["device"] > 0
    assert "/fork NAME" in [each["usage"] for each in commands["commands"]]
    assert left == {"conversation": "main", "command": "/quit"}


def test_what_is_refused_is_a_record_too_and_the_chat_goes_on() -> None:
    unknown, usage, none, answer = chat("/nonsense", "/fork", "/undo", NOAH)
    assert unknown["error"] == "there is no /nonsense; /help lists the commands"
    assert usage["error"] == "usage: /fork NAME"
    assert "no turn" in none["error"]
    assert answer["reason"] == "length"


def test_an_answer_that_ctrl_c_stopped_says_so(interrupt_step: Callable[[int], None]) -> None:
    (whole,) = chat(NOAH)
    interrupt_step(3)
    stopped, stats = chat(NOAH, "/stats")
    assert stopped["reason"] == "interrupted"
    assert stopped["tokens"] == whole["tokens"][:3]
    assert stopped["prompt_tokens"] == stopped["computed"] == 9
    assert whole["text"].startswith(stopped["text"])
    assert stats["conversations"][0]["tokens"] == 9 + 3


def test_an_output_that_lacks_letters_gets_them_escaped(tmp_path: Path) -> None:
    """Whatever the encoding of standard output, the value is the same."""
    path = tmp_path / "prompt"
    path.write_text("And God said “Noah”", encoding="utf-8")
    arguments = ["generate", "--prompt-file", str(path), "--max-tokens", "1", "--json"]
    found = {}
    for encoding in ("ascii", "utf-8"):
        result = CliRunner(charset=encoding).invoke(kvcache_engine.command.main.app, arguments)
        assert result.exit_code == 0, result.output
        found[encoding] = json.loads(result.stdout_bytes.decode(encoding))["outputs"][0]["prompt"]
        assert ("\\u201c" in result.stdout) == (encoding == "ascii")
    assert found == dict.fromkeys(found, "And God said “Noah”")


def test_tables_of_a_chat_go_on_below_in_their_column_where_a_terminal_is_narrow() -> None:
    long = "draw them below each answer as it arrives; again: stop"
    rows = [("/live", long), ("/quit", "leave"), ("", "")]
    assert aligned(rows) == f"/live  {long}\n/quit  leave\n       "
    assert aligned(rows, 40).splitlines() == [
        "/live  draw them below each answer as it",
        "       arrives; again: stop",
        "/quit  leave",
        "       ",
    ]
    assert aligned(rows, 10) == aligned(rows), "too narrow for two columns: the terminal wraps it"
