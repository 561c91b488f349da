"""A sample of the census of transformers' models, and the table that it writes."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("torch")

import torch

from benchmarks.census import transformers as census
from benchmarks.census import transformers_types as small

SAMPLE = {
    "bamba": {"fork": "=", "prefix": "="},
    "blenderbot with encoder": {"crop": "=", "fork": "=", "copy": "=", "save": "="},
    "cpmant": {"static": "refused"},
    "gemma3_text": {"interrupt": "=", "prefix, lookup": "="},
    "gemma3n_text": {"copy": "=", "prefix": "="},
    "gemma4_text": {"fork": "=", "copy": "=", "save": "=", "prefix": "="},
    "git": {"static": "="},
    "gpt_neo": {"static": "refused"},
    "gpt_neox_japanese": {"batch": "=", "static": "="},
    "hrm_text": {"interrupt": "="},
    "jamba": {"chunked": "refused", "save": "=", "prefix": "="},
    "lfm2": {"lookup": "=", "assisted": "="},
    "lfm2_moe": {"lookup": "=", "assisted": "="},
    "lfm3": {"lookup": "=", "assisted": "=", "crop": "="},
    "mamba": {"beams": "=", "fork": "=", "prefix": "refused"},
    "mllama with image": {"fork": "=", "assisted": "right", "static": "="},
    "moshi": {"chunked": "theirs", "assisted": "theirs", "prefix": "refused"},
    "nemotron_h": {"copy": "theirs", "save": "theirs", "prefix": "="},
    "prophetnet": {"static": "refused"},
    "recurrent_gemma": {"single": "=", "fork": "refused", "interrupt": "="},
    "roberta": {"prefix": "="},
    "t5gemma": {"install": "=", "fork": "right"},
    "t5gemma2": {"install": "=", "static": "="},
}
"""What became of some types in the modes that were hard for them."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def case(label: str) -> census.Case:
    return census.Case(label)


@pytest.mark.filterwarnings("ignore")  # transformers', of decoding in ways that models are not made for
@pytest.mark.parametrize(
    ("label", "mode", "kind"),
    [(label, mode, kind) for label, modes in SAMPLE.items() for mode, kind in modes.items()],
)
def test_what_becomes_of_a_type_in_a_mode(label: str, mode: str, kind: str) -> None:
    assert census.judge(case(label), mode)[0] == kind


def test_a_wrong_cache_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    made = census.Case("llama")
    crop = census.HFCache.crop
    monkeypatch.setattr(census.HFCache, "crop", lambda cache, tokens: crop(cache, tokens + 1))
    assert census.judge(made, "crop")[0] == "wrong"


def test_results_are_kept_and_not_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    docs, results = tmp_path / "page.md", tmp_path / "results.json"
    docs.write_text("before\n<!-- census -->\nold\n<!-- /census -->\nafter\n", encoding="utf-8")
    monkeypatch.setattr(census, "DOCS", docs)
    monkeypatch.setattr(census, "MODES", {name: census.MODES[name] for name in ("crop", "static")})
    monkeypatch.setattr(small, "types", functools.partial(_some, small.types()))
    asked = ["--results", str(results), "--render"]
    assert census.main(asked) == 0
    assert [*json.loads(results.read_text(encoding="utf-8"))] == ["gemma3n", "gpt_neo", "gpt2", "llama"]
    text = docs.read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- census -->\n| types | crop | static |\n|---|---|---|\n")
    assert "| 2: gpt2, llama | = | = |\n| 1: gpt_neo | = | r1 |\n\n1. NotSupportedError: HFStatic" in text
    assert "Not built: gemma3n (needs timm" in text
    assert text.endswith("<!-- /census -->\nafter\n")
    capsys.readouterr()
    assert census.main(asked) == 0
    assert capsys.readouterr().out == ""
    assert docs.read_text(encoding="utf-8") == text


def _some(found: dict[str, Any]) -> dict[str, Any]:
    return {label: found[label] for label in ("gemma3n", "gpt_neo", "gpt2", "llama")}


def test_the_table_of_the_docs_has_every_type() -> None:
    table = census.DOCS.read_text(encoding="utf-8").split(census.MARKS[0])[1].split(census.MARKS[1])[0]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    labels = [label for row in rows for label in row.split("|")[1].split(": ", 1)[1].strip().split(", ")]
    assert sorted([*labels, *small.CANNOT]) == sorted(small.types())
    assert not any(census.SHORT["wrong"] in row for row in rows)
