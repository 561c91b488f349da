"""Completion in a real bash, zsh and fish, from the script to the first Tab."""

from __future__ import annotations

import functools
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("typer")

from ..needs import need_program

ROOT = Path(__file__).resolve().parents[2]
ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[a-zA-Z]|[=>])")
PATIENCE = 30.0


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """Settings with an empty home, where ``kvcache`` is this checkout's."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "kvcache"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m kvcache_engine "$@"\n')
    program.chmod(0o755)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".zshrc").write_text("PS1='> '\n")
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("ZDOTDIR", "XDG_"))},
        "HOME": str(tmp_path / "home"),
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TERM": "xterm",
        "OMP_NUM_THREADS": "1",
    }


def typed(program: str, settings: dict[str, str], steps: list[tuple[str, str]]) -> str:
    """Each text is typed once what stands beside it was shown; gives all that was shown."""
    import pty

    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(program, [program, "-i"], settings)
    shown = ""
    try:
        for awaited, text in steps:
            until, seen = time.monotonic() + PATIENCE, len(shown)
            while awaited not in ESCAPES.sub("", shown[seen:]) and time.monotonic() < until:
                if select.select([terminal], [], [], 0.1)[0]:
                    shown += os.read(terminal, 1 << 16).decode(errors="replace")
            assert awaited in ESCAPES.sub("", shown[seen:]), ESCAPES.sub("", shown)
            os.write(terminal, text.encode())
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)
    return ESCAPES.sub("", shown)


@pytest.mark.skipif(os.name == "nt", reason="there are no pseudo-terminals")
def test_zsh_completes_from_the_first_tab_on(home: dict[str, str]) -> None:
    zsh = need_program("zsh")
    typed(zsh, home, [("> ", "kvcache --install-completion\n"), ("completion installed in", "")])
    settings = Path(home["HOME"]) / ".zshrc"
    assert "compinit" in settings.read_text()
    settings.write_text(settings.read_text() + "PS1='> '\n")
    typed(zsh, home, [("> ", "kvcache gen\t"), ("generate ", "--backend nu\t"), ("numpy ", "")])


def ran(program: str, settings: dict[str, str], script: str) -> str:
    """What a script prints, which has to say itself for which shell it asks."""
    env = {**settings, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    line = [program, "-c", f"{script}; true"]
    ended = subprocess.run(line, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def test_bash_completes_with_the_script_that_is_shown(home: dict[str, str]) -> None:
    """Whose function then fills COMPREPLY."""
    script = (
        'eval "$(kvcache --show-completion bash)"\n'
        "COMP_WORDS=(kvcache generate --backend nu) COMP_CWORD=3\n"
        "_kvcache_completion kvcache\n"
        'echo "${COMPREPLY[@]}"'
    )
    assert ran(need_program("bash"), home, script) == "numpy\n"


def test_fish_completes_commands_and_backends(home: dict[str, str]) -> None:
    run = functools.partial(ran, need_program("fish"), home)
    script = run("kvcache --show-completion fish")
    folder = Path(home["HOME"]) / ".config" / "fish" / "completions"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kvcache.fish").write_text(script)
    assert run("complete -C 'kvcache gen'").split("\t")[0] == "generate"
    offered = dict(line.split("\t") for line in run("complete -C 'kvcache generate --backend '").splitlines())
    assert offered["torch"] == "pip install 'ml-kvcache[torch]'"
