"""The tests that a peer ships for its own cache, run on ours.

``python -m benchmarks.peers_tests {mlx-lm,transformers} --source DIR``.

DIR is the peer's source at the version that is installed. mlx-lm's source distribution has its tests:
``pip download --no-deps --no-binary mlx-lm mlx-lm==0.32.2``, unpacked. That of transformers has
``tests/test_executorch.py``; the others are in its repository only (``git clone --depth 1 --branch v5.23.0
https://github.com/huggingface/transformers``; they need ``pip install parameterized``). None of their code is
copied: the test files are run where they lie, with our classes in the places of those that we stand in for.
"""

from __future__ import annotations

import argparse
import io
import unittest
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType

__all__ = ["main", "run"]

KINDS = ("passed", "failed", "not ours")
"""Always counted; "skipped", "alike" and "theirs too" where they occur."""

FILES = {
    "mlx-lm": (
        "ml-explore/mlx-lm",
        [
            "tests/test_prompt_cache.py",
            "tests/test_generate.py",
            "tests/test_server.py",
            "tests/test_models.py",
        ],
    ),
    "transformers": (
        "huggingface/transformers",
        ["tests/utils/test_cache_utils.py", "tests/test_executorch.py"],
    ),
}
"""The repository of each peer on GitHub, and its tests of caches: those that are there are run."""

Place = Callable[[], AbstractContextManager[None]]
Outcome = tuple[str, str, str]
"""Of a test: its name, what became of it, and why."""


def run(module: ModuleType, used: dict[str, int], ours: Place, theirs: Place) -> Iterator[Outcome]:
    """What became of every unittest in ``module``.

    ``used`` counts, by name, how often one of our classes was made; a test that makes none is "not ours".
    ``ours`` and ``theirs`` are what puts either's classes in place. Every test runs on the peer's own first.
    One that fails on them says nothing of ours, and is "theirs too", or "alike" where ours makes it fail in
    the same words: what a real model would have written is not what a random one writes, but with either's
    cache it has to write the same.
    """
    for case in unittest.defaultTestLoader.loadTestsFromModule(module):
        for test in case:  # type: ignore[union-attr]
            expected = _run(test, theirs)
            used.clear()
            result = expected if expected.skipped else _run(test, ours)
            yield test.id().rpartition(".")[2], *_outcome(result, expected, used)


class _Result(unittest.TestResult):
    @property
    def unsuccessful(self) -> bool:
        return bool(self.failures or self.errors)

    @property
    def message(self) -> str:
        """The line that names the first failure; "" without one."""
        if not self.unsuccessful:
            return ""
        lines = io.StringIO([*self.failures, *self.errors][0][1]).read().strip().splitlines()
        return next((line for line in lines if line[:1].isalpha() and "Error" in line), lines[-1])


def _run(test: unittest.TestCase | unittest.TestSuite, place: Place) -> _Result:
    result = _Result()
    with place():
        unittest.TestSuite([test]).run(result)
    return result


def _outcome(result: _Result, expected: _Result, used: dict[str, int]) -> tuple[str, str]:
    made = ", ".join(f"{count} {name}" for name, count in sorted(used.items()))
    if result.skipped:
        return "skipped", result.skipped[0][1]
    if expected.unsuccessful:
        kind = "alike" if used and result.message == expected.message else "theirs too"
        return kind, expected.message
    if not used:
        return "not ours", "makes none of the classes that we stand in for"
    if result.unsuccessful:
        return "failed", result.message
    return "passed", made


def _outcomes(peer: str, source: Path, only: Sequence[str]) -> Iterator[Outcome]:
    repository, names = FILES[peer]
    paths = [source / name for name in names if (source / name).is_file()]
    if not paths:
        raise SystemExit(
            f"{source / names[0]} is not there; --source is the source of github.com/{repository}"
        )
    paths = [path for path in paths if not only or path.name in only]
    if peer == "mlx-lm":
        from benchmarks import peers_mlx_lm as peers
    else:
        from benchmarks import peers_transformers as peers  # type: ignore[no-redef]
    modules, used = peers.prepared(paths)
    for path, module in zip(paths, modules, strict=True):
        print(f"{path.relative_to(source)}:")
        yield from run(module, used, peers.ours, peers.theirs)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers_tests", description=__doc__)
    parser.add_argument("peer", choices=FILES)
    parser.add_argument("--source", type=Path, required=True, help="the peer's source, with its tests")
    parser.add_argument("--file", action="append", default=[], help="run the test files of this name only")
    options = parser.parse_args(arguments)
    counts: Counter[str] = Counter()
    for name, outcome, reason in _outcomes(options.peer, options.source, options.file):
        print(f"{outcome:8}  {name}\n          {reason}", flush=True)
        counts[outcome] += 1
    for kind in (*KINDS, *sorted(counts.keys() - {*KINDS})):
        print(f"{kind}: {counts[kind]}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
