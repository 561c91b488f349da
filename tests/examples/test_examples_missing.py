"""Examples without the packages that they need, or with wrong arguments, say so in one line."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

WITHOUT = """
import runpy, sys
missing, kind, what, *sys.argv[1:] = sys.argv[1:]
sys.modules[missing] = None  # importing it fails as if it were not there
if kind == "-m":
    runpy.run_module(what, run_name="__main__", alter_sys=True)
else:
    runpy.run_path(what, run_name="__main__")
"""
"""Runs an example as ``python [-m] what`` does, where one package is missing."""


def started(missing: str, *line: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT, missing, *line]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=ROOT, check=False, timeout=60
    )


CASES = [
    ("torch", "", "examples/own_loop/torch_attention.py", "torch is not installed", "ml-kvcache[torch]"),
    ("mlx", "", "examples/own_loop/mlx_attention.py", "mlx is not installed", "ml-kvcache[mlx]"),
    ("cupy", "", "examples/own_loop/cupy_attention.py", "cupy is not installed", "ml-kvcache[cupy"),
    ("torch", "", "examples/train_tiny", "train_tiny: torch is not installed", "torch>=2.9"),
    ("torch", "-m", "examples.train_tiny", "train_tiny: torch is not installed", "torch>=2.9"),
    ("matplotlib", "-m", "examples.pictures", "occupancy.svg needs matplotlib", "ml-kvcache[plots]"),
]


@pytest.mark.parametrize(("missing", "kind", "what", "said", "remedy"), CASES)
def test_a_missing_package_is_told_in_one_line_with_the_remedy(
    missing: str, kind: str, what: str, said: str, remedy: str, tmp_path: Path
) -> None:
    pytest.importorskip("xxhash")
    ended = started(missing, kind, what, str(tmp_path))
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert said in ended.stderr
    assert "pip install" in ended.stderr
    assert remedy in ended.stderr


WRONG = {
    "examples.eviction --budgets 64 4": "each of --budgets must be at least 5",
    "examples.eviction --chunk 0": "--chunk must be at least 1",
    "examples.eviction --text /no/such": "--text /no/such: [Errno 2] No such file",
    "examples.eviction --text /dev/null": "--text /dev/null: no piece has more than 300 tokens",
    "examples.eviction --model /no/such": "/no/such: no such model folder",
    "examples.pictures /dev/null/x": "pictures: /dev/null/x: Not a directory",
    "examples.train_tiny --seed -1": "--seed: -1 is not at least 0",
    "examples.train_tiny --batch 0": "--batch: 0 is not at least 1",
}


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # by another test of the process
@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_argument_is_told_in_one_line(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch" if "train_tiny" in words else "xxhash")
    module, *arguments = words.split()
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    out, told = capsys.readouterr()
    told += ended.value.code if isinstance(ended.value.code, str) else ""  # which Python itself would print
    assert out == ""
    assert ended.value.code in (1, 2, told)
    assert WRONG[words] in told.splitlines()[-1]
