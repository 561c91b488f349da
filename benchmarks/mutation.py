"""How many small faults in the core the tests notice: mutmut over six areas, each with quick tests.

``python -m benchmarks.mutation`` goes on where it was stopped; ``--sample 0`` takes every mutant, ``--again``
those that were not killed, after their tests changed. Figures and survivors go to docs/mutation.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mutmut.configuration import reset_config
from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.file_mutation import mutate_file_contents
from mutmut.stats import status_by_exit_code
from mutmut.utils.format_utils import get_mutant_name

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / ".mutation"
RESULT = ROOT / "docs" / "mutation.json"
NOTICED = ("killed", "timeout", "segfault")
TRACES, COMPUTING = (
    f"tests/kvcache/test_cache_numpy.py::{which}::test_random_traces_agree_with_the_model"
    for which in ("TestStorageOnly", "TestNumpy")
)
SNAPSHOTS = "tests/kvcache/caches/test_snapshots.py"
CONVERSATIONS = (
    "tests/kvcache/prefix/test_conversations.py::test_sessions_see_what_computing_from_nothing_would_store"
)
READING = (
    "a_query_sees_exactly",
    "an_elided_mask_is_causal_bottom_right_for_a_prompt_and_none_where_all_see_all",
    "a_mask_that_says_more_is_not_elided",
    "extras_keep_their_shapes_and_dtypes",
    "what_was_put_is_read_bit_for_bit",
    "what_a_layer_does_not_store_is_refused_and_leaves_all_as_it_was",
    "a_query_attends_to_the_chosen_rows_that_it_sees",
)
KEEPING = (
    "a_snapshot_outlives_what_it_was_taken_of",
    "a_window_gets_of_another_ones_snapshot_what_it_would_hold_or_nothing",
    "what_is_split_and_merged_is_what_it_was",
)
ATTENDING = (
    "several_sequences_in_any_order_attend_to_their_own",
    "sequences_with_one_prefix_decode_together",
    "after_sharing_removing_and_moving",
    "cells_that_lie_far_apart",
    "rows_that_a_query_does_not_see_do_no_harm_whatever_they_hold",
    "a_query_attends_to_the_chosen_rows_that_it_sees",
    "chosen_rows_far_apart_or_many_are_read_in_any_number_of_steps",
    "in_every_dtype_of_the_cache_and_of_the_query",
)


@dataclass(frozen=True)
class Area:
    files: tuple[str, ...]
    tests: tuple[str, ...]


def _files(start: str, *names: str) -> list[str]:
    return [f"{start}{name}.py" for name in names]


def _in_suite(names: Iterable[str]) -> list[str]:
    """Both halves of what the suite runs on NumPy."""
    classes = "kvcache/test_cache_numpy.py::TestNumpy", "backends/test_conformance_strict.py::TestCaches"
    return [f"tests/{where}::test_{name}" for name in names for where in classes]


AREAS = {
    "cell table": Area(
        ("kvcache/storage/cell_table.py",),
        (
            *("tests/kvcache/storage/test_cell_table.py", "tests/kvcache/prefix/test_direct_load.py", TRACES),
            f"{SNAPSHOTS}::test_a_window_that_goes_on_without_what_it_sees_says_so_once",
            *("-k", "not torch and not mlx and not cupy and not CuPy"),
        ),
    ),
    "read plan": Area(
        (
            *_files(
                "kvcache/attention/",
                *("batch", "forward_pass", "fixed_shapes", "masks", "plan", "history", "dense_batch"),
                *("pass_reads", "layer_cells"),
            ),
        ),
        (
            *_files(
                "tests/kvcache/attention/test_",
                *(
                    "dense_batch",
                    "uneven_batches",
                    "pass_reads",
                    "fixed_shapes",
                    "large_masks",
                    "attend_plan",
                ),
            ),
            *_files("tests/kvcache/caches/test_", "order", "refusals"),
            "tests/kvcache/storage/test_formats.py::test_what_was_encoded_elsewhere_is_stored_as_it_is",
            *(TRACES, COMPUTING),
            *_in_suite(READING),
            *("-k", "not torch and not mlx and not cupy and not jax and not graph"),
        ),
    ),
    "attention": Area(
        tuple(_files("kvcache/attention/", "attend", "calls", "segments")),
        (
            *_files("tests/kvcache/attention/test_", "attend_plan", "attend_quantized", "eviction"),
            "tests/kvcache/storage/test_formats_rotated.py",
            *_in_suite(ATTENDING),
            *("-k", "not torch and not mlx and not cupy and not jax and not example"),
        ),
    ),
    "snapshots": Area(
        ("kvcache/snapshots/*.py",),
        (
            *_files(
                "tests/kvcache/snapshots/test_",
                *("snapshot_cut", "serialize", "layer_shapes", "check_serialized"),
            ),
            *_files(
                "tests/kvcache/caches/test_",
                *("snapshots", "snapshots_and_passes", "partial_passes", "states", "wrapper_snapshots"),
            ),
            *_files("tests/kvcache/prefix/test_", "direct_load", "paging"),
            TRACES,
            *_in_suite(KEEPING),
            *("-k", "not torch and not mlx and not cupy and not CuPy"),
        ),
    ),
    "prefix tree": Area(
        tuple(f"kvcache/prefix/{name}.py" for name in ("radix_tree", "prefix_tree", "matcher")),
        (
            *_files(
                "tests/kvcache/prefix/test_",
                *(
                    "radix_tree",
                    "eviction",
                    "finding",
                    "interior",
                    "offload",
                    "retention",
                    "sessions",
                    "tiers",
                ),
                *(
                    "store_contents",
                    "tenants",
                    "tenant_budgets",
                    "restore_progress",
                    "break_even",
                    "prefetch",
                ),
                *("paging", "slow_stores"),
            ),
            *(f"{CONVERSATIONS}[{cache}]" for cache in ("causal", "recurrent")),
        ),
    ),
    "FileStore": Area(
        tuple(f"kvcache/stores/{name}.py" for name in ("file", "folder", "index", "closing", "entries")),
        (
            *_files("tests/kvcache/stores/test_", "index", "files", "files_failing", "faults", "refusals"),
            "tests/kvcache/stores/test_suite.py::TestFileStore",
            *("-k", "not no_key and not valkey and not mooncake"),  # mutmut cannot name the ids of no_key
        ),
    ),
}


def prepare(name: str, area: Area) -> Path:
    """A folder with links to the project and a project file that tells mutmut of this area."""
    folder = WORK / name.replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    for part in (
        "kvcache",
        "kvcache_engine",
        "ml",
        "backends",
        "ml_kvcache",
        "tests",
        "benchmarks",
        "docs",
        "examples",
    ):
        if not (folder / part).exists():
            (folder / part).symlink_to(ROOT / part)
    settings = {
        "source_paths": ["kvcache"],
        "only_mutate": list(area.files),
        "also_copy": ["ml", "backends", "ml_kvcache"],
        "do_not_mutate_patterns": [r"^\s*raise \w+", r"\b(_?[lL]og(ger)?|warnings)\.\w+\("],
        "pytest_add_cli_args": ["-p", "no:cacheprovider", "-p", "no:xdist"],
        "pytest_add_cli_args_test_selection": list(area.tests),
        "use_git_change_detection": False,
        "process_isolation": "forkserver",  # threads of a test that ran before do not live on in a fork
        "timeout_multiplier": 4.0,
        "timeout_constant": 10.0,  # seconds of a busy machine
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    text = f"{project}\n[tool.mutmut]\n" + "\n".join(lines) + "\n"
    told = folder / "pyproject.toml"
    if not told.exists() or told.read_text(encoding="utf-8") != text:
        told.write_text(text, encoding="utf-8")
        (folder / "mutants" / "mutmut-stats.json").unlink(missing_ok=True)  # which tests concern which mutant
    return folder


def mutants(area: Area) -> dict[str, Path]:
    """Every mutant of the area -> its file; run in the area's folder."""
    reset_config()
    return {
        get_mutant_name(path, name): path
        for pattern in area.files
        for path in sorted(Path().glob(pattern))
        for name in mutate_file_contents(str(path), path.read_text(encoding="utf-8")).mutant_names
    }


def statuses(found: dict[str, Path]) -> dict[str, str]:
    """What became of each mutant so far, in the files that have not changed since."""
    codes: dict[str, int | None] = {}
    for path in set(found.values()):
        mutated = Path("mutants") / path
        if mutated.exists() and path.stat().st_mtime < mutated.stat().st_mtime:
            data = SourceFileMutationData(path=path)
            data.load()
            codes |= data.exit_code_by_key
    # 255 is not a time limit, as mutmut has it, but a run of pytest that failed to begin.
    return {name: status_by_exit_code[code if (code := codes.get(name)) != 255 else None] for name in found}


def change(mutant: str) -> list[str]:
    """The lines that the mutant takes away and adds."""
    shown = subprocess.run(["mutmut", "show", mutant], capture_output=True, text=True, check=True).stdout
    lines = shown.splitlines()
    return [
        line[0] + line[1:].strip() for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]


def measure(name: str, area: Area, arguments: argparse.Namespace) -> dict[str, object]:
    os.chdir(prepare(name, area))
    every = mutants(area)
    chosen = sorted(every)
    if 0 < arguments.sample < len(chosen):
        chosen = sorted(random.Random(arguments.seed).sample(chosen, arguments.sample))
    sample = {mutant: every[mutant] for mutant in chosen}
    if arguments.again:
        Path("mutants/mutmut-stats.json").unlink(missing_ok=True)
    known = statuses(sample)
    repeated = ("not checked", "survived", "no tests", "timeout") if arguments.again else ("not checked",)
    if todo := [mutant for mutant, status in known.items() if status in repeated]:
        subprocess.run(["mutmut", "run", "--max-children", str(arguments.jobs), *todo], check=True)
        known = statuses(sample)
    counts = Counter(known.values())
    survivors = {mutant: change(mutant) for mutant in chosen if known[mutant] not in NOTICED}
    noticed = sum(counts[status] for status in NOTICED)
    print(f"{name}: {noticed} of {len(chosen)} noticed, {len(every)} in all", *survivors, sep="\n  ")
    return {
        "mutants": len(every),
        "sampled": len(chosen),
        "noticed": noticed,
        "score": round(noticed / len(chosen), 3),
        "survivors": survivors,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"of {', '.join(AREAS)}; all without")
    parser.add_argument("--sample", type=int, default=60, help="mutants per area, 0 for all (60)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (one per core)")
    parser.add_argument("--again", action="store_true", help="test those that were not killed once more")
    arguments = parser.parse_args()
    os.environ["ML_UNSHRUNK"] = "1"  # that a test fails is enough
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    for name in arguments.areas or AREAS:
        result[name] = {"seed": arguments.seed, **measure(name, AREAS[name], arguments)}
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
