"""The suite is itself tested: every deliberate bug of *_mutants.py is caught, an exact copy passes.

Each backend here is a copy of the NumPy backend, registered under a name of its own as a third
party's would be; the suite runs on it in a nested pytest session in this process.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import backends.numpy.backend
from kvcache.testing import CacheTests
from ml import Availability, BackendSpec, Features, hookimpl
from ml.base import BaseTensor
from ml.dtypes import DType
from ml.plugins import registry
from ml.testing import BackendTests
from ml.testing.attention import AttentionTests
from ml.testing.groups import GroupTests
from ml.testing.harness import BackendCase
from ml.testing.optional import CapabilityTests
from ml.testing.quantized import QuantizedTests
from ml.testing.quick import QUICK
from ml.testing.refusals import RefusalTests
from ml.testing.stores import KVStoreTests
from ml.testing.transfers import PageTransferTests

from ..kvcache.planting import UNUSED
from .quantized_mutants import MUTANTS

NUMBERS = itertools.count()


AREAS = [area for area in BackendTests.__mro__ if issubclass(area, BackendCase)][1:-1]


@pytest.fixture
def copy() -> ModuleType:
    """The module of the NumPy backend once more, with classes of its own."""
    name = "copy_of_the_numpy_backend"
    spec = importlib.util.spec_from_file_location(name, backends.numpy.backend.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Plugin:
    """What a third party's entry point would name."""

    def __init__(self, module: ModuleType, features: Features) -> None:
        def opened(**options: Any) -> Any:
            backend = module.NumpyBackend(**options)
            backend._name = "mutant"
            return backend

        self.record = BackendSpec("mutant", -1, (), "", lambda: Availability(True), opened, features)

    @hookimpl
    def ml_backend(self) -> BackendSpec:
        return self.record


class Reports:
    """What a nested session reported; of a failure that its test failed, not where."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.failed: list[str] = []
        self.passed: list[str] = []
        self.lacking: list[str] = []
        """Tests of capabilities that the backend lacks, or does not offer for these cases."""
        self.cases: list[object] = []
        """Of tables, those that failed."""
        self.told = ""
        """All that failures say."""

    def pytest_configure(self, config: pytest.Config) -> None:
        config.option.tbstyle = "native"  # no source is looked up for it

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid.split("::")[-1])
            self.cases += [case for name, case in report.user_properties if name == "ml_case"]
            self.told += report.longreprtext
        elif report.when == "call" or report.skipped:
            self.outcomes[report.outcome] += 1
            self.passed += [report.nodeid.split("::")[-1]] if report.passed else []
            lacks = re.search("no Supports|the kernel leaves", str(report.longrepr))
            self.lacking += [report.nodeid.split("::")[-1]] if lacks else []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        assert not report.failed, report.longreprtext


def session(*arguments: str) -> tuple[int, Reports]:
    reports = Reports()
    fixed = ["-Werror", "--import-mode=importlib", "-pno:cacheprovider"]
    return pytest.main([*fixed, *arguments], [reports]), reports


@pytest.fixture
def run_suite(tmp_path: Path) -> Iterator[Any]:
    """run_suite(module, area, features) -> Reports."""
    plugins: list[Any] = []

    def run(
        module: ModuleType,
        area: type[BackendCase],
        features: Features | None = None,
        *options: str,
        stop: bool = True,
        stride: int = 1,
    ) -> Reports:
        while plugins:
            registry().unregister(plugins.pop())
        plugins.append(Plugin(module, features or Features()))
        registry().register(plugins[0], "mutant")
        file = tmp_path / f"test_{next(NUMBERS)}.py"
        file.write_text(
            f"from {area.__module__} import {area.__name__}\n\n"
            f"class TestMutant({area.__name__}):\n    backend_name = 'mutant'\n    examples = 5\n"
            f"    case_stride = {stride}\n"
        )
        _, reports = session(str(file), f"--rootdir={tmp_path}", "-pno:terminal", *options, *["-x"] * stop)
        return reports

    yield run
    for plugin in plugins:
        registry().unregister(plugin)


# Bugs.

OFFERED = "test_an_operation_is_offered_exactly_when_it_is_not_declared_absent"

LEFT_TO_THE_WHOLE = {
    AttentionTests, CapabilityTests, KVStoreTests, GroupTests, PageTransferTests, QuantizedTests,
    RefusalTests,
}  # fmt: skip
"""Areas of which the quick part has nothing, or little."""
QUICKLY = {
    "sinks_are_ignored", "padded_rows_of_a_mask_are_queries_too", "causal_is_top_left_aligned",
    "the_logarithm_is_to_base_2", "a_ragged_batch_ignores_its_sinks",
}  # fmt: skip
"""Bugs in capabilities that the quick part catches nevertheless."""
LATE = {"overlap_is_judged_by_storage", "what_is_contiguous_is_not_copied"}
"""Others that it does not."""


NAMED = {
    "a_logit_of_minus_infinity_keeps_a_little_weight": "a_logit_of_minus_infinity_weighs_exactly_nothing",
    "equality_has_a_tolerance": "neighbouring_numbers_are_not_equal",
    "from_native_forgets_where_a_view_begins": "native_of_one_tensor_becomes_another_through_from_native",
    "rows_are_read_in_the_order_of_memory": "rows_reads_views_of_any_dtype",
    "a_backend_works_in_the_thread_that_opened_it_alone": "a_backend_opened_in_one_thread_is_used_in_others",
    "f32_truncates_to_bf16": "cast_converts_exactly_as_the_contract_says",
    "an_overlapping_copy_runs_forward": "an_overlapping_copy_acts_as_if_the_source_were_read_first",
    "set_rows_reads_its_own_rows_while_writing": "set_rows_from_its_own_rows_reads_them_first",
    "from_numpy_keeps_the_callers_memory": "what_goes_in_and_comes_out_is_copied",
    "exp_ends_before_the_range_does": "functions_of_special_values_match_float64",
    "an_operation_is_left_out_without_a_word": OFFERED.removeprefix("test_"),
    "overlap_is_judged_by_storage": "two_tensors_of_one_native_array_overlap_too",
    "what_is_contiguous_is_not_copied": "new_storage_is_independent_of_its_source",
    "clamp_without_bounds_returns_its_operand": "other_results_are_new_storage",
    "a_stepped_slice_is_a_copy": "any_walk_of_views_and_writes_agrees_with_flat_memory",
    "a_stride_of_0_is_taken_for_1": "random_views_are_read_as_numpys_as_strided",
    "argmax_takes_the_last_of_ties": "results_are_exact",
    "gelu_is_always_the_tanh_one": "functions_match_float64",
}
"""The tests that the guide names for these mistakes: they fail, whatever else does."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_bug_is_caught_by_its_area_and_already_by_the_quick_part_of_it(
    mutant: Any, copy: ModuleType, run_suite: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in the quick part is in the whole, and so is each seventh case, tried before all."""
    mutant.plant(copy)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    whole = mutant.name in LATE or (mutant.area in LEFT_TO_THE_WHOLE and mutant.name not in QUICKLY)
    runs = [[] if whole else ["--ml-quick"]]
    if named := NAMED.get(mutant.name):
        tier = ["--ml-quick"] if f"test_{named}" in QUICK else []
        runs = [[*tier, "-k", named], *(run for run in runs if run != tier)]
    for chosen in runs:
        options = ["-pml_kvcache.pytest_plugin", *UNUSED, *chosen]
        assert any(run_suite(copy, mutant.area, None, *options, stride=stride).failed for stride in (7, 1))


def test_each_mistake_of_the_guides_table_is_planted_and_noticed_in_the_tier_that_it_says() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "writing-a-backend.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"`(test_\w+)`(\*?)", guide.partition("## What each failure means")[2]))
    assert {f"test_{name}" for name in NAMED.values()} == rows.keys()
    assert {name for name, star in rows.items() if not star} == rows.keys() & QUICK.keys()
    assert NAMED.keys() <= {mutant.name for mutant in MUTANTS}


def test_a_failure_names_the_cases_that_failed(copy: ModuleType, run_suite: Any) -> None:
    (truncates,) = (one for one in MUTANTS if one.name == "f32_truncates_to_bf16")
    truncates.plant(copy)
    reports = run_suite(copy, truncates.area)
    assert reports.cases == ["F32-BF16-cast"]
    # What was cast, with its bits; what came out; what should have.
    number = r"-?[\d.e+-]+"
    assert re.search(rf"{number} \(0x[0-9a-f]{{8}}\) as BF16 is {number}, not {number};", reports.told)


def test_what_the_quick_part_names_exists(tmp_path: Path) -> None:
    """Each name and each pattern selects something; all of it passes on NumPy, if it has the capability."""
    names = ("ml.testing", "kvcache.testing", "kvcache_engine.testing")
    suites = ["--pyargs", *names, "--ml-backend=numpy", "--ml-quick"]
    code, reports = session(f"--rootdir={tmp_path}", "-pno:terminal", "-c", os.devnull, *suites)
    assert code == pytest.ExitCode.OK
    ran = {re.split(r"\W", name)[0] for name in reports.passed}
    assert ran | {re.split(r"\W", name)[0] for name in reports.lacking} == QUICK.keys()


def test_an_exact_copy_passes_everything(copy: ModuleType, run_suite: Any) -> None:
    reports = run_suite(copy, BackendTests, stride=7)
    assert not reports.failed
    assert reports.outcomes["passed"] > 140


def test_every_area_of_the_suite_has_a_bug_of_its_own() -> None:
    assert {mutant.area for mutant in MUTANTS} == set(AREAS)


def test_no_test_hides_another_of_the_same_name() -> None:
    """The areas are bases of one class: a name given twice would silently drop a test."""
    names = Counter(name for area in AREAS for name in vars(area) if name.startswith("test_"))
    assert [name for name, count in names.items() if count > 1] == []


# Features.


COMPUTE_METHODS = (
    "_binary", "_unary", "_scale", "_gelu", "_clamp", "_matmul", "_softmax", "_reduce", "_argsort", "_top_k",
    "_rms_norm", "_compare", "_where",
)  # fmt: skip


def without_compute(module: ModuleType) -> None:
    for name in COMPUTE_METHODS:
        setattr(module.NumpyTensor, name, getattr(BaseTensor, name))


def test_a_storage_only_backend_that_says_so_passes(copy: ModuleType, run_suite: Any) -> None:
    without_compute(copy)
    reports = run_suite(copy, BackendTests, Features(absent=frozenset({"compute"})), stride=7)
    assert not reports.failed
    assert reports.outcomes["passed"] > 120
    assert reports.outcomes["skipped"] > 15


def test_a_storage_only_backend_that_does_not_say_so_fails(copy: ModuleType, run_suite: Any) -> None:
    without_compute(copy)
    failed = run_suite(copy, RefusalTests, stop=False).failed
    assert f"{OFFERED}[matmul]" in failed
    assert f"{OFFERED}[copy]" not in failed


@pytest.mark.parametrize("absent", ["softmax", "repeat", "from_native"])
def test_an_absence_that_is_not_true_fails(copy: ModuleType, run_suite: Any, absent: str) -> None:
    reports = run_suite(copy, RefusalTests, Features(absent=frozenset({absent})), stop=False)
    assert reports.failed == [f"{OFFERED}[{absent}]"]


def test_an_absence_that_the_contract_does_not_know_fails(copy: ModuleType, run_suite: Any) -> None:
    reports = run_suite(copy, RefusalTests, Features(absent=frozenset({"sofmax"})))
    assert reports.failed == ["test_what_is_declared_absent_exists_in_the_contract"]
    assert "names no operations of the contract: ['sofmax']" in reports.told


SAMPLE = "fits_any or bound_of_the_format or random_traces or any_states or as_halves or exact_tokens"


@pytest.mark.parametrize(("suite", "least"), [(BackendTests, 150), (CacheTests, 30)])
def test_a_backend_without_some_dtypes_that_says_so_passes(
    copy: ModuleType, run_suite: Any, suite: type[BackendCase], least: int
) -> None:
    """And nothing more is skipped than what needs them; of the caches' suite, a sample runs."""
    offered = frozenset({DType.F32, DType.I32, DType.I64, DType.BOOL})
    copy.NumpyBackend.features = Features(dtypes=offered)
    sample = ["-k", SAMPLE] if suite is CacheTests else []
    reports = run_suite(copy, suite, Features(dtypes=offered), *sample, stride=7)
    assert not reports.failed
    assert reports.outcomes["passed"] > least
    assert run_suite(copy, RefusalTests).failed


def test_a_backend_of_another_name_than_it_is_opened_by_fails(
    copy: ModuleType, run_suite: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy.NumpyBackend, "name", "other")
    (failed,) = run_suite(copy, RefusalTests, None, "-k", "has_the_name").failed
    assert failed == "test_a_backend_has_the_name_that_it_is_opened_by"


# The command line, and test files of other projects.


def test_the_shipped_suite_runs_by_package_name(tmp_path: Path) -> None:
    code, reports = session(
        f"--rootdir={tmp_path}", "--pyargs", "ml.testing", "--ml-backend=numpy", "-k", "outlive"
    )
    assert code == pytest.ExitCode.OK
    assert reports.outcomes["passed"] >= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], r"which backend\? Add --ml-backend=NAME"),
        (["--ml-backend=nope"], "no backend 'nope'; known: .*numpy"),
        (["--ml-backend-option=device=cpu"], "needs --ml-backend"),
        (["--ml-backend=numpy", "--ml-backend-option=device"], "give KEY=VALUE"),
        (["--ml-backend=numpy", "--ml-backend-option=dtype=F99"], "one of .*BF16"),
        (["--ml-backend=numpy", "--ml-time-limit=-1"], "--ml-time-limit=-1: from 0 to 1e"),
        (["--ml-backend=numpy", "--ml-time-limit=nan"], "--ml-time-limit=nan: from 0 to 1e"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    code, _ = session(f"--rootdir={tmp_path}", "--pyargs", "ml.testing", "--collect-only", "-q", *options)
    assert code == pytest.ExitCode.USAGE_ERROR
    assert re.search(message, capfd.readouterr().err.replace("\n", " "))


THIRD_PARTY = """
import ml, pytest
from ml.testing.{module} import {area}

class TestMine({area}):
    features = ml.Features()

    @pytest.fixture
    def backend(self):
        with ml.open_backend("numpy") as backend:
            yield backend
"""


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_the_test_in_which_the_process_ends_is_named_by_plain_pytest_too(tmp_path: Path, end: str) -> None:
    file = tmp_path / f"test_{next(NUMBERS)}.py"
    text = "import os, signal\nfrom ml.testing.order import OrderTests\n\nclass TestMine(OrderTests):\n"
    file.write_text(
        f"{text}    def test_before(self):\n        pass\n    def test_ending(self):\n        {end}\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-pno:cacheprovider",
        "-k",
        "before or ending",
        str(file),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == (
        f"{file.name}::TestMine::test_ending: the process ended during this test"
    )


@pytest.mark.parametrize(("module", "area"), [("refusals", "RefusalTests"), ("order", "OrderTests")])
def test_a_third_party_may_override_the_backend_fixture(tmp_path: Path, module: str, area: str) -> None:
    file = tmp_path / f"test_{next(NUMBERS)}.py"
    file.write_text(THIRD_PARTY.format(module=module, area=area))
    code, reports = session(f"--rootdir={tmp_path}", "-pno:terminal", str(file))
    assert code == pytest.ExitCode.OK
    assert reports.outcomes["passed"] > 10
