"""``python -m benchmarks.gpu --stage N --out DIR``: docs/devices.md says what a stage gives and needs.

Each stage ends within nine minutes and writes DIR/N.json as it goes. The exit code is 1 where a stage failed,
5 where none did and a step was skipped, else 0. A goal that is missed is no failure.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.gpu.record import Options, Skipped, Stage

STAGES = {
    "a": ("machine", "STEPS", "versions, the device, memory's speed, which attention is taken, a profile"),
    "b": ("suites", "TORCH", "the shipped suites and the project's test files on PyTorch"),
    "c": ("suites", "CUPY", "the same on CuPy, and the own loop"),
    "d": ("answers", "STEPS", "models say what they say on NumPy"),
    "e": ("embedded", "STEPS", "inside transformers: eager, compiled, captured"),
    "f": ("tables", "STEPS", "put, get, attend and start_forward beside floors and peers"),
    "g": ("paging", "STEPS", "pages to host memory and back, beside memcpy"),
    "h": ("several", "STEPS", "several devices, their exchange, a rank that is killed"),
}
FAILED, SKIPPED = 1, 5
GRACE = 60.0
"""Seconds that a step may go on when the stage's are over, where several stages were asked for."""
OURS = ("", "benchmarks", "backends", "kvcache", "kvcache_engine", "ml")


def main(argv: Sequence[str] | None = None) -> int:
    asked = _parsed(argv)
    if asked.list:
        for letter, (_, _, title) in STAGES.items():
            print(f"{letter}  {title}")
        return 0
    stages = list(dict.fromkeys(asked.stage or STAGES))
    if len(stages) == 1:
        own = asked.out.resolve(), asked.device, asked.quick, asked.seconds, asked.stories, asked.step
        return _run(Stage(stages[0], Options(*own)))
    common = ["--out", str(asked.out), "--device", asked.device, "--seconds", str(asked.seconds)]
    common += ["--step", asked.step, *["--quick"] * asked.quick]
    common += ["--stories", str(asked.stories)] if asked.stories else []
    codes = [_in_a_process(["--stage", letter, *common], asked.seconds + GRACE) for letter in stages]
    return FAILED if set(codes) - {0, SKIPPED} else max(codes)


def _in_a_process(arguments: Sequence[str], seconds: float) -> int:
    """Run a stage by itself: an error of CUDA spoils all that follows in a process, a hang all that waits."""
    try:
        return subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu", *arguments], timeout=seconds
        ).returncode
    except subprocess.TimeoutExpired:
        print(f"{arguments[1]}: ended after {seconds:g} seconds; its record says in which step", flush=True)
        return FAILED


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--stage", action="append", choices=list(STAGES), help="repeatable; else all of them")
    parser.add_argument("--list", action="store_true", help="say what the stages are")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="a folder for what is found")
    parser.add_argument("--device", default="cuda", help="as PyTorch names it: cuda, cuda:1, cpu")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: a glance, no result")
    parser.add_argument("--step", default="", help="of a stage only the steps with this in their names")
    parser.add_argument("--seconds", type=float, default=520.0, help="after which a stage begins no step")
    parser.add_argument(
        "--stories", type=Path, help="a folder of stories260K (else ../shared/models/stories260K)"
    )
    return parser.parse_args(argv)


def _run(stage: Stage) -> int:
    result = stage.run(steps_of(stage.letter))
    for goal in stage.goals:
        told = "met" if goal["met"] else "MISSED"
        print(f"{stage.letter}: {goal['goal']}: {goal['figure']:.4g}, {goal['wanted']}: {told}")
    print(f"{stage.letter}: {result}; {stage.path}", flush=True)
    return {"ok": 0, "failed": FAILED}.get(result, SKIPPED)


def steps_of(letter: str) -> Mapping[str, Callable[[Stage], object]]:
    """A stage's steps; where one of the packages that it imports is missing, one that says so."""
    module, name, _ = STAGES[letter]
    try:
        steps: Mapping[str, Callable[[Stage], object]] = getattr(
            importlib.import_module(f"benchmarks.gpu.{module}"), name
        )
    except ImportError as error:
        foreign = (error.name or "").partition(".")[0] not in OURS and isinstance(error, ModuleNotFoundError)
        told = Skipped(f"{error.name} is not installed") if foreign else error

        def absent(stage: Stage) -> None:
            raise told

        return {"import": absent}
    return steps


if __name__ == "__main__":
    sys.exit(main())
