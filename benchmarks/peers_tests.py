"""The tests that a peer ships for its own cache, run on ours.

``python -m benchmarks.peers_tests PEER``; ``make test-peers`` runs all of them, each in the environment that
has the peer.

``peers_sources`` says where the peer's source is from; without one nothing is run, and the reason is printed.
The test files are run where they lie, with our classes in the places of those that we stand in for, and small
models with random weights in the places of those that the files would download.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import re
import sys
import time
import unittest
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import pytest

from benchmarks import pages
from benchmarks.peers_sources import REPOSITORIES, NoSourceError, described, installed, source_of

KINDS = ("passed", "failed", "not ours")
"""Always counted; "skipped", "left out", "alike" and "theirs too" where they occur."""

FILES = {
    "mlx-lm": "tests/ test_prompt_cache.py test_generate.py test_server.py test_models.py",
    "transformers": "tests/ utils/test_cache_utils.py test_executorch.py generation/test_utils.py",
    "lmcache": (
        "tests/ v1/storage_backend/test_fs_connector.py v1/test_connector.py "
        "v1/distributed/test_mock_l2_adapter.py v1/distributed/test_fault_inject_l2_adapter.py"
    ),
    "vllm": "tests/ v1/core/test_scheduler.py v1/core/conformance/test_connector_tier.py",
    "sglang": "test/registered/unit/mem_cache/ test_hicache_file_lru_unit.py",
}
"""The folder of each peer's tests, and those of caches: those that are there are run."""

RECORD, PAGE = "benchmarks/peers-tests.json", "models.md"


class Peer(Protocol):
    """A module that puts classes in place, for the test modules that ``prepared`` imports."""

    LEFT_OUT: dict[str, str]
    """Patterns of tests that are not run, and why."""

    def prepared(
        self, paths: Sequence[Path]
    ) -> AbstractContextManager[tuple[Sequence[ModuleType | Path], Counter[str]]]:
        """The modules, or files for pytest, and a count, by name, of how often one of our classes is made."""

    def ours(self) -> AbstractContextManager[None]: ...
    def theirs(self) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class Ran:
    """One test on one side's classes: "passed", "skipped" or "failed", and why."""

    outcome: str
    why: str = ""


def run(
    peer: Peer, module: ModuleType, used: Counter[str], cases: Sequence[str] = ()
) -> Iterator[tuple[str, str, str]]:
    """Of every unittest in ``module``, or of these ``cases``: its name, what became of it, and why.

    Every test runs on the peer's own classes first. One that fails on both is "theirs too", or "alike" where
    ours makes it fail in the same words: what a real model would have written is not what a random one
    writes, but with either's cache it has to write the same. A test that makes none of our classes is "not
    ours".
    """
    for case in unittest.defaultTestLoader.loadTestsFromModule(module):
        for test in case:  # type: ignore[union-attr]
            name = ".".join(test.id().split(".")[-2:])  # type: ignore[union-attr]
            case_name, _, method = name.partition(".")
            if cases and case_name not in cases:
                continue
            if why := left_out(peer, method):
                yield name, "left out", why
                continue
            theirs = _unittest(test, peer.theirs())
            used.clear()
            ours = theirs if theirs.outcome == "skipped" else _unittest(test, peer.ours())
            yield name, *outcome(ours, theirs, used)


def run_pytest(
    peer: Peer, path: Path, source: Path, used: Counter[str], cases: Sequence[str] = ()
) -> Iterator[tuple[str, str, str]]:
    """As ``run``, of a file whose tests are pytest's; ``cases`` are functions or classes."""
    theirs, ours = _Recorder(peer, peer.theirs, used, cases), _Recorder(peer, peer.ours, used, cases)
    options = ["-q", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", "-W", "ignore", "--runxfail"]
    with imported_from(source):
        for side in theirs, ours:
            code = pytest.main([*options, "-c", os.devnull, f"--rootdir={source}", str(path)], plugins=[side])
            if code not in (0, 1, 5):  # all passed, some failed, none was there
                raise SystemExit(f"{path}: pytest ended with {code!r}")
    for name, why in theirs.left_out.items():
        yield name, "left out", why
    for name, there in theirs.ran.items():
        yield name, *outcome(ours.ran.get(name, Ran("failed", "was not run")), there, ours.made[name])


class _Recorder:
    """A plugin of pytest, which runs each test with one side's classes and keeps what became of it."""

    def __init__(self, peer: Peer, place: Any, used: Counter[str], cases: Sequence[str]) -> None:
        self.peer, self.place, self.used, self.cases = peer, place, used, cases
        self.ran: dict[str, Ran] = {}
        self.made: dict[str, Counter[str]] = {}
        self.left_out: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        cases = {*self.cases}
        chosen = [item for item in items if not cases or cases & {*re.split(r"\W+", _name(item.nodeid))}]
        for item in chosen:
            if why := left_out(self.peer, item.name):
                self.left_out[_name(item.nodeid)] = why
        items[:] = [item for item in chosen if _name(item.nodeid) not in self.left_out]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.used.clear()
        with self.place():
            done = yield
        self.made[_name(item.nodeid)] = Counter(self.used)
        return done

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name, before = _name(report.nodeid), self.ran.get(_name(report.nodeid))
        if report.when == "call" or (report.outcome != "passed" and before is None):
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else _line(report.longreprtext)
            self.ran[name] = Ran(report.outcome, why)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            raise SystemExit(f"{report.nodeid}: {report.longreprtext}")


def _name(nodeid: str) -> str:
    return nodeid.partition("::")[2].replace("::", ".")


def left_out(peer: Peer, test: str) -> str:
    """Why this test is not run; "" if it is."""
    return next((why for pattern, why in peer.LEFT_OUT.items() if fnmatchcase(test, pattern)), "")


@contextlib.contextmanager
def imported_from(source: Path) -> Iterator[None]:
    """``import tests`` means those of ``source``, which import each other so."""
    ours = {name: sys.modules.pop(name) for name in [*sys.modules] if name.split(".")[0] == "tests"}
    sys.path.insert(0, str(source))
    try:
        yield
    finally:
        sys.path.remove(str(source))
        for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
            del sys.modules[name]
        sys.modules.update(ours)


def _unittest(test: Any, place: AbstractContextManager[None]) -> Ran:
    result = unittest.TestResult()
    with place:
        unittest.TestSuite([test]).run(result)
    if result.skipped:
        return Ran("skipped", result.skipped[0][1])
    if failed := [*result.failures, *result.errors]:
        return Ran("failed", _line(failed[0][1]))
    return Ran("passed")


def _line(traceback: str) -> str:
    """The line that names the error."""
    lines = traceback.strip().splitlines() or [""]
    return next((line for line in lines if line[:1].isalpha() and "Error" in line), lines[-1])


def outcome(ours: Ran, theirs: Ran, used: Counter[str]) -> tuple[str, str]:
    if "skipped" in (ours.outcome, theirs.outcome):
        return "skipped", ours.why or theirs.why
    if theirs.outcome == "failed" and not (used and ours.outcome == "passed"):
        return "alike" if used and ours.why == theirs.why else "theirs too", theirs.why
    if not used:
        return "not ours", "makes none of the classes that we stand in for"
    if ours.outcome == "failed":
        return "failed", ours.why
    return "passed", ", ".join(f"{count} {name}" for name, count in sorted(used.items()))


# For the peers' modules.

SHAPE: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
"""Of the models, which have random weights."""

_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer(**options: Any) -> Any:
    """A tokenizer with a token for each printable character.

    Token 0 is "!", as in the vocabularies of GPT-2 and Qwen, which some tests rely on. The end of the text
    lies beyond the models' vocabulary: random weights never end it.
    """
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    characters = [*map(chr, range(ord("!"), ord("~") + 1)), " ", "\n"]
    ids = {character: i for i, character in enumerate(characters)}
    whole = {**ids, "<pad>": len(ids), "<end>": SHAPE["vocab_size"]}
    inner = Tokenizer(models.BPE(whole, [], unk_token="<pad>"))
    inner.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", unk_token="<pad>", eos_token="<end>", **options
    )
    made.chat_template = _TEMPLATE
    return made


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"peers_tests_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def named(modules: Sequence[Any], **found: Any) -> Iterator[None]:
    """Give these names to what is found, in the modules that have them."""
    before = [
        (module, name, vars(module)[name]) for module in modules for name in found if name in vars(module)
    ]
    try:
        for module, name, _ in before:
            setattr(module, name, found[name])
        yield
    finally:
        for module, name, old in before:
            setattr(module, name, old)


def table_of(record: Mapping[str, Any]) -> str:
    """A row of each file: how many tests came to what."""
    rows = []
    for peer, files in record.items():
        for file, found in files.items():
            count = Counter({outcome: len(names) for outcome, names in found["tests"].items()})
            theirs = count["alike"] + count["theirs too"]
            rest = sum(count.values()) - count["passed"] - count["failed"] - theirs
            shown = (count["passed"], count["failed"], theirs, rest)
            tests = f"`{file}`" + (f" at {found['source']}" if found.get("source") else "")
            rows.append([f"{peer} {found['version']}, {tests}", *map(str, shown), f"{found['seconds']}"])
    head = ["tests of", "passed", "failed", "fail on the runtime's own too"]
    return pages.table([*head, "not about these classes, skipped, or left out", "s"], rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers_tests", description=__doc__)
    parser.add_argument("peer", choices=FILES)
    parser.add_argument("--source", type=Path, help="the peer's source")
    parser.add_argument("--file", action="append", default=[], help="run the test files of this name only")
    parser.add_argument("--case", action="append", default=[], help="run the test cases of this name only")
    parser.add_argument(
        "--record", action="store_true", help=f"into docs/{RECORD}, and its table into docs/{PAGE}"
    )
    options = parser.parse_args(arguments)
    try:
        options.source = options.source or source_of(options.peer)
    except NoSourceError as error:
        print(f"not run: {error}")
        return 0
    folder, *names = FILES[options.peer].split()
    paths = [options.source / folder / name for name in names]
    if not any(path.is_file() for path in paths):
        repository = REPOSITORIES[options.peer]
        raise SystemExit(f"{paths[0]} is not there; --source is the source of github.com/{repository}")
    paths = [path for path in paths if not options.file or path.name in options.file]
    for path in paths:
        if not path.is_file():
            print(f"not run: {path} is not there")
    paths = [path for path in paths if path.is_file()]
    os.environ["HF_HUB_OFFLINE"] = "1"  # what a test would download is missed at once
    peer: Peer = importlib.import_module(f"benchmarks.peers_{options.peer.replace('-', '_')}")
    counts: Counter[str] = Counter()
    with peer.prepared(paths) as (modules, used):
        for path, module in zip(paths, modules, strict=True):
            file, began = str(path.relative_to(options.source / folder)), time.process_time()
            tests: dict[str, dict[str, str]] = {}
            print(f"{folder}{file}:")
            chosen = options.case
            found = (
                run_pytest(peer, module, options.source, used, chosen)
                if isinstance(module, Path)
                else run(peer, module, used, chosen)
            )
            for name, result, reason in found:
                print(f"{result:8}  {name}\n          {reason}", flush=True)
                tests.setdefault(result, {})[name] = reason
                counts[result] += 1
            seconds = round(time.process_time() - began)
            print(f"{seconds} s of the processor")
            if options.record:
                source = described(options.source)
                kept = {
                    "version": installed(options.peer), **({"source": source} if source else {}),
                    "seconds": seconds, "tests": tests,
                }  # fmt: skip
                _keep(options.peer, file, kept)
    for kind in (*KINDS, *sorted(counts.keys() - {*KINDS})):
        print(f"{kind}: {counts[kind]}")
    return 0


def _keep(peer: str, file: str, found: Mapping[str, Any]) -> None:
    record = pages.load(pages.DOCS / RECORD)
    record.setdefault(peer, {})[file] = found
    pages.save(pages.DOCS / RECORD, record)
    pages.fill(pages.DOCS / PAGE, {"own-tests": table_of(record)})


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a test that failed may have left a thread that does not end
