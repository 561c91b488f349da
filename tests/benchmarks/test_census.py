"""A sample of the census of both libraries' models, what it calls wrong, its records and their page."""

from __future__ import annotations

import functools
import importlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("torch")
pytest.importorskip("mlx_lm")

import mlx.core as mx
import torch

from benchmarks import pages
from benchmarks.census import __main__ as command
from benchmarks.census import engine, page
from benchmarks.census import mlx_lm as of_mlx_lm
from benchmarks.census import transformers as of_transformers
from kvcache.integrations.mlx_lm.storage import Storage

SAMPLE = {
    "bamba": {"fork": "="},
    "blenderbot with encoder": {"copy": "="},
    "cpmant": {"static": "refused"},
    "deepseek_v32": {"static": "="},
    "deepseek_v4": {"crop": "right"},
    "falcon_h1": {"prefix": "="},
    "gemma3_text": {"prefix, lookup": "="},
    "gemma3n_text": {"copy": "="},
    "gemma4_text": {"fork": "="},
    "git": {"static": "="},
    "gpt_neo": {"static": "refused"},
    "gpt_neox_japanese": {"batch": "="},
    "hrm_text": {"interrupt": "="},
    "inkling_text": {"crop": "="},
    "jamba": {"chunked": "refused"},
    "lfm2_moe": {"assisted": "="},
    "lfm3": {"lookup": "="},
    "mamba": {"beams": "="},
    "minimax": {"chunked": "right"},
    "mllama with image": {"assisted": "right"},
    "moshi": {"prefix": "refused"},
    "nemotron_h": {"save": "theirs"},
    "prophetnet": {"static": "refused"},
    "qwen4_exp_text": {"save": "="},
    "recurrent_gemma": {"single": "=", "fork": "refused"},
    "roberta": {"prefix": "="},
    "t5gemma": {"fork": "right"},
    "t5gemma2": {"install": "="},
    "zamba": {"fork": "="},
    "zaya": {"beams": "=", "interrupt": "="},
}
"""What became of some of transformers' types in a mode that was hard for them; ``make census`` has all."""
OF_MLX_LM = {
    "baichuan_m1": {"save": "="},  # states beside a window
    "deepseek_v32": {"trim": "="},  # an indexer's keys
    "falcon_h1": {"copy": "="},  # attention and states in one layer
    # Full, sliding and recurrent layers. mlx-lm trims neither states nor windows that have wrapped; ours goes
    # back to what it keeps.
    "gear": {
        **dict.fromkeys(of_mlx_lm.MODES, "="),
        **dict.fromkeys(["padding", "left padding", "trim"], "right"),
    },
    "gemma2": {"batch": "right"},  # has no room for a mask of each row
    "gpt_oss": {"batch": "="},
    "iquestloopcoder": {"batch": "="},  # two entries for each layer
    "jamba": {"padding": "right"},  # asks for a mask, and drops it
    "kimi_linear": {"left padding": "="},  # four states in a layer, of several shapes
    "llama4": {"other's files": "="},  # chunks, one position
    "longcat_flash": {"batch": "="},  # attention twice in a layer
    "longcat_flash_ngram": {"trim": "right"},  # a state that grows, of integers
    "mamba2": {"exception": "="},  # nothing but recurrent layers
    "minimax_m3_vl": {"batch": "right"},  # an indexer's keys, values of width 0
    "nemotron-nas": {"exception": "="},  # wants an entry that it never uses
    "plamo3": {"chunks": "right"},  # sees more than its window
    "recurrent_gemma": {"copy": "="},  # takes no notice of padding
    "rwkv7": {"batch": "right"},  # asks for no mask
    # A window, latents of groups, an open group; mlx-lm neither batches nor loads its entries.
    "deepseek_v41": {"save": "cannot"},
}
CASES = [
    (library, name, mode, kind)
    for library, sample in ((of_transformers, SAMPLE), (of_mlx_lm, OF_MLX_LM))
    for name, modes in sample.items()
    for mode, kind in modes.items()
]


@pytest.fixture(autouse=True)
def _little_work(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(of_transformers, "NEW", 8)  # windows and what they keep to go back are shorter still
    yield
    torch.set_num_threads(before)


@functools.lru_cache(maxsize=1)  # the modes of a type come one after another
def case(library: Any, name: str) -> Any:
    return library.Case(name)


@pytest.mark.filterwarnings("ignore")  # transformers', of decoding in ways that models are not made for
@pytest.mark.parametrize(
    ("library", "name", "mode", "kind"), CASES, ids=[f"{name}, {mode}" for _, name, mode, _ in CASES]
)
def test_what_becomes_of_a_type_in_a_mode(library: Any, name: str, mode: str, kind: str) -> None:
    found, told = engine.judge(library, case(library, name), mode)
    assert (found, told) == (kind, told)


def test_a_wrong_cache_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    crop, read = of_transformers.HFCache.crop, Storage.get

    def disturbed(self: Storage, layer: int, one: Any) -> tuple[Any, Any]:
        keys, values = read(self, layer, one)
        return keys, mx.concatenate([values[..., 1:, :], values[..., :1, :]], axis=2)

    monkeypatch.setattr(of_transformers.HFCache, "crop", lambda cache, tokens: crop(cache, tokens + 1))
    monkeypatch.setattr(Storage, "get", disturbed)
    assert engine.judge(of_transformers, case(of_transformers, "llama"), "crop")[0] == "wrong"
    qwen = case(of_mlx_lm, "qwen3")
    assert [engine.judge(of_mlx_lm, qwen, mode)[0] for mode in ("alone", "chunks")] == ["wrong", "wrong"]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_type_that_ends_its_process_ends_no_other() -> None:
    def make(name: str) -> str:
        if name == "no case":
            os.kill(os.getpid(), signal.SIGKILL)
        return name

    def run(name: str, which: str) -> str:
        if (name, which) == ("no result", "ours"):
            os.kill(os.getpid(), signal.SIGKILL)
        return name

    library: Any = SimpleNamespace(
        Case=make, MODES={"one": run}, agree=str.__eq__, is_right=lambda *found: True
    )
    found = [engine.isolated(library, name) for name in ("no case", "no result", "good")]
    told = "the process ends with SIGKILL"
    assert found == [{"": told}, {"one": ("wrong", told)}, {"one": ("=", "")}]


def test_results_are_kept_and_not_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.json"
    names = ["gemma3n", "gpt_neo", "gpt2", "llama"]
    modes = {name: of_transformers.MODES[name] for name in ("crop", "static")}
    monkeypatch.setattr(engine, "isolated", in_this_process)
    monkeypatch.setattr(page, "RECORDS", tmp_path)
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    for name, value in {"MODES": modes, "types": lambda: names, "quiet": str}.items():
        monkeypatch.setattr(of_transformers, name, value)
    asked = ["transformers", "--results", str(results)]
    assert command.main(asked) == 0
    assert [*pages.load(results)] == names
    capsys.readouterr()
    assert command.main(asked) == 0
    assert capsys.readouterr().out == ""

    mark, end = "before\n<!-- table: transformers -->\n", "<!-- end -->\nafter\n"
    page.PAGE.write_text(f"{mark}old\n{end}", encoding="utf-8")
    former = {"gpt2": {"": "not built then"}, "glm": {"crop": ("=", ""), "static": ("theirs", "")}}
    page.keep(former, tmp_path / "transformers.json")
    assert command.main(["transformers", "--render", str(results)]) == 0
    text = page.PAGE.read_text(encoding="utf-8")
    assert text.startswith(f"{mark}\n4 types were built; 4 are supported and 0 refused.")
    assert "**Equal in every mode** (2): gpt2, llama." in text
    assert "better in every mode** (1): glm." in text
    assert "| gpt_neo | static |  |" in text
    assert "**Not built**: gemma3n (needs timm" in text
    assert text.endswith(end)
    assert command.main(["transformers", "--render"]) == 0
    assert page.PAGE.read_text(encoding="utf-8") == text
    capsys.readouterr()
    assert command.main(["transformers", "--table"]) == 0
    whole = capsys.readouterr().out
    assert (
        "| group | crop | static |\n|---|---|---|\n| 1 | = | = |\n| 2 | = | ~ |\n| 3 | = | r1 |\n"
        in whole
    )
    assert "| 1 | 2 | gpt2, llama |" in whole
    assert "\n1. NotSupportedError: HFStatic" in whole


def test_a_page_hides_nothing_that_is_wrong_or_was_not_run() -> None:
    found: dict[str, Any] = {"a": {"one": ("=", ""), "a, b": ("wrong", "")}, "b": {"one": ("refused", "")}}
    shown = page.tables("mlx-lm", found)["mlx-lm"]
    assert "| a | WRONG: a (b) |  |" in shown
    assert "| b | everything |  |" in shown
    found = {
        "a": {"driven": ("rows", ""), "mixed": ("wrong", "")},
        "b": {"driven": ("refused", "E: f: b is so; go")},
    }
    shown = page.tables("mlx-lm-engine", found)["mlx-lm-engine"]
    assert "| a | rows; mixed: wrong |" in shown
    assert "| b | refused: is so |" in shown
    assert "2 types were built; 1 are supported and 1 refused." in shown


def in_this_process(library: Any, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    engine.examine(library, name, found.update)
    return found


@pytest.mark.parametrize("name", ["transformers", "mlx-lm", "transformers-engine", "mlx-lm-engine"])
def test_a_record_has_every_type_and_nothing_wrong_and_the_page_is_that_of_it(name: str) -> None:
    """Else: python -m benchmarks.census NAME --results FILE, and then --render FILE."""
    record = pages.load(page.RECORDS / f"{name}.json")
    library = importlib.import_module(f"benchmarks.census.{name.replace('-', '_')}")
    assert sorted(record) == sorted(library.types())
    built = [found for found in record.values() if "" not in found]
    modes = {page.DRIVEN} if name.endswith("-engine") else library.MODES.keys()
    assert all(modes <= found.keys() <= library.MODES.keys() for found in built)
    assert not [kind for found in built for kind, _ in found.values() if kind == "wrong"]
    text = page.PAGE.read_text(encoding="utf-8")
    assert pages.filled(text, page.tables(name, record)) == text
    assert f"<!-- table: {name} -->" in text


def test_other_pages_count_as_the_record_does() -> None:
    good, built = page.supported(pages.load(page.RECORDS / "transformers.json"))
    guide = (pages.DOCS / "embedding-transformers.md").read_text(encoding="utf-8")
    assert f"[{good} of {built} model types](models.md" in guide
