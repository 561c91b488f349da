"""A sample of the census of mlx-lm's models; the census sees what is wrong, and the page has all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

import mlx.core as mx

from benchmarks.census import mlx_lm as census
from benchmarks.census import mlx_lm_types as small
from kvcache.integrations.mlx_lm.storage import Storage

ALIKE = dict.fromkeys(census.MODES, "=")
NO_TRIM = {**ALIKE, "trim": "right"}
"""mlx-lm trims neither states nor windows that have wrapped; ours goes back to what it keeps."""


@pytest.mark.parametrize(
    ("name", "verdicts"),
    [
        ("iquestloopcoder", NO_TRIM),  # two entries for each layer
        ("gear", NO_TRIM),  # full, sliding and recurrent layers
        ("mamba2", NO_TRIM),  # nothing but recurrent layers
        ("recurrent_gemma", {**NO_TRIM, "batch": "refused"}),  # takes no notice of padding
        ("nemotron-nas", {**ALIKE, "batch": "right"}),  # wants an entry that it never uses
        ("plamo3", {**dict.fromkeys(ALIKE, "right"), "other's files": "theirs"}),  # sees more than its window
    ],
)
def test_a_type_gives_in_every_mode_what_mlx_lms_own_caches_or_no_cache_give(
    name: str, verdicts: dict[str, str]
) -> None:
    found = census.examine(name)
    assert {mode: kind for mode, (kind, _) in found["modes"].items()} == verdicts


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("llama4", 0),
        ("deepseek_v32", 0),
        ("kimi_linear", 0),
        ("falcon_h1", 0),
        ("longcat_flash_ngram", 1),
        ("rwkv7", 0),
    ],
)
def test_a_type_that_has_no_cache_here_is_refused_before_anything_is_computed(name: str, layer: int) -> None:
    found = census.examine(name)
    assert found["outcome"] == "refused"
    assert f"layer {layer} of the model wants mlx-lm's" in found["told"]


def test_the_census_calls_other_keys_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Storage.get

    def disturbed(self: Storage, layer: int, one: Any) -> tuple[Any, Any]:
        keys, values = read(self, layer, one)
        return keys, mx.concatenate([values[..., 1:, :], values[..., :1, :]], axis=2)

    monkeypatch.setattr(Storage, "get", disturbed)
    found = census.examine("qwen3", modes=["alone", "chunks"])
    assert [kind for kind, _ in found["modes"].values()] == ["wrong", "wrong"]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_type_that_ends_its_process_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    import os
    import signal

    def examine(name: str, say: Any) -> dict[str, Any]:
        say("mlx-lm")
        if name == "one":
            os.kill(os.getpid(), signal.SIGKILL)
        return {"outcome": "run", "modes": {}}

    monkeypatch.setattr(census, "examine", examine)
    found = dict(census.isolated(["one", "two"]))
    assert found["one"] == {"outcome": "theirs", "told": "the process ends with signal 9"}
    assert found["two"]["outcome"] == "run"


def test_the_page_has_every_type_and_nothing_wrong() -> None:
    text = census.PAGE.read_text(encoding="utf-8")
    table = text[text.index(census.MARKS[0]) : text.index(census.MARKS[1])]
    assert [name for name in small.types() if f"`{name}`" not in table] == []
    assert "wrong" not in table
    assert Path(census.PAGE).name in (census.__doc__ or "")
