"""examples/train_tiny: the pipeline on a little text, its parts, and loading the result by transformers."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", minversion="2.9", reason="examples/train_tiny needs torch >= 2.9 (its Muon)")
for needed in ("tokenizers", "safetensors", "matplotlib"):
    pytest.importorskip(needed, reason=f"examples/train_tiny needs {needed}")

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "train_tiny"
BUNDLED = ROOT / "kvcache" / "runner" / "tiny"
WORDS = [
    "and",
    "the",
    "LORD",
    "said",
    "unto",
    "Moses",
    "speak",
    "children",
    "of",
    "Israel",
    "bread",
    "day",
    "holy",
]


def make_text(chapters: int) -> str:
    """Chapters of seven verses of twelve words; the first line of each names it."""
    choose = random.Random(0)
    verses = [[" ".join(choose.choices(WORDS, k=12)) + "." for _ in range(7)] for _ in range(chapters)]
    return "\n\n".join(f"Chapter {i + 1}.\n" + "\n".join(lines) for i, lines in enumerate(verses)) + "\n"


def train_tiny(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("train_tiny")
    (base / "text.txt").write_text(make_text(40), encoding="utf-8")
    result = train_tiny("--text", base / "text.txt", "--steps", 2, "--batch", 1, "--out", base / "out")
    assert result.returncode == 0, result.stderr
    return base / "out"


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    from train_tiny import cli, corpus, evaluate, export, tokenizer, windows

    return SimpleNamespace(
        cli=cli, corpus=corpus, evaluate=evaluate, export=export, tokenizer=tokenizer, windows=windows
    )


@pytest.fixture
def here(package: SimpleNamespace) -> Iterator[Callable[..., int]]:
    """``here(*args)``: the command in this process, as its exit status."""
    import torch

    threads, state = torch.get_num_threads(), torch.get_rng_state()
    yield lambda *args: package.cli.main([str(arg) for arg in args])
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


def test_writes_every_file(trained: Path) -> None:
    expected = {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
        "loss.svg",
    }
    assert {path.name for path in trained.iterdir()} == expected | {"heldout.txt", "training_log.json"}


def test_log_and_card_report_the_run(trained: Path) -> None:
    log = json.loads((trained / "training_log.json").read_text(encoding="utf-8"))
    assert [step for step, _ in log["train"]] == [2]
    assert log["heldout_bits_per_byte"] > 0
    card = (trained / "README.md").read_text(encoding="utf-8")
    assert f"**{log['heldout_bits_per_byte']:.3f} bits per byte**" in card


def test_heldout_is_every_twentieth_chapter(trained: Path) -> None:
    assert (trained / "heldout.txt").read_text(encoding="utf-8").startswith("Chapter 20.\n")


def test_training_is_reproducible_in_another_process(
    trained: Path, tmp_path: Path, here: Callable[..., int]
) -> None:
    text = trained.parent / "text.txt"
    assert here("--text", text, "--steps", 2, "--batch", 1, "--out", tmp_path) == 0
    assert (tmp_path / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()
    assert (tmp_path / "tokenizer.json").read_bytes() == (trained / "tokenizer.json").read_bytes()
    assert (tmp_path / "loss.svg").read_bytes() == (trained / "loss.svg").read_bytes()


def test_transformers_computes_the_same_logits(trained: Path, package: SimpleNamespace) -> None:
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    import torch

    theirs = transformers.LlamaForCausalLM.from_pretrained(trained, dtype=torch.float32)
    assert (theirs.config.bos_token_id, theirs.config.eos_token_id) == (1, 2)
    ours = package.export.load_model(trained)
    tokens = torch.arange(3, 203).view(2, 100)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "text", ["And God said,\nLet there be light.", "  two  spaces\t\r\n\n", "żółw 🐢 \u0000", ""]
)
def test_tokenizer_round_trip(trained: Path, text: str) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(trained / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert ids[0] == 1
    assert tokenizer.decode(ids) == text


def test_windows_start_at_verses_and_cover_an_epoch(package: SimpleNamespace) -> None:
    import numpy as np

    newline, length = 9, 8
    chapters = [np.array([10, 11, newline, 12, 13, 14, newline, 15, 16, 17]) for _ in range(20)]
    windows = package.windows.Windows(chapters, newline, length, seed=0)
    batch = next(windows.batches(4))
    assert batch.inputs[:, 0].tolist() == [package.tokenizer.BOS] * 4
    assert batch.inputs[:, 1:].equal(batch.targets[:, :-1])
    assert set(batch.targets[:, 0].tolist()) <= {10, 12, 15}
    seen = {position for start in windows.epoch() for position in range(start, start + length)}
    assert len(seen) > 0.7 * len(windows.stream)


def test_parse_verses(package: SimpleNamespace) -> None:
    printed = "Ge1:1 In the beginning.\n1Sm2:10 The adversaries.\n\nPsa119:176 I have gone astray.\n"
    expected = [("Ge1", "In the beginning."), ("1Sm2", "The adversaries."), ("Psa119", "I have gone astray.")]
    assert package.corpus.parse_verses(printed) == expected


def test_without_the_bible_program_says_what_to_install(
    package: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(RuntimeError, match="apt-get install -y bible-kjv bible-kjv-text"):
        package.corpus.read_bible()


@pytest.mark.parametrize(
    ("text", "message"),
    [("one chapter\n", "at least 2 are needed"), ("a b c\n\nd e f\n", "the training text has")],
)
def test_bad_text_is_one_line_and_exit_1(
    tmp_path: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    assert here("--text", tmp_path / "text.txt", "--out", tmp_path / "out") == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert message in said
    assert not (tmp_path / "out").exists()


def test_report_judges_the_same_model_again(trained: Path, here: Callable[..., int]) -> None:
    names = ("README.md", "training_log.json", "loss.svg", "heldout.txt")
    before = {name: (trained / name).read_bytes() for name in names}
    assert here("--text", trained.parent / "text.txt", "--report", "--out", trained) == 0
    assert {name: (trained / name).read_bytes() for name in names} == before


def test_report_without_a_model_is_one_line_and_exit_1_of_the_process(trained: Path, tmp_path: Path) -> None:
    result = train_tiny("--text", trained.parent / "text.txt", "--report", "--out", tmp_path)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "train first" in result.stderr


def test_bundled_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in BUNDLED.iterdir()) <= 4_000_000


def test_bundled_tokenizer_round_trips_the_heldout_text() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    text = (BUNDLED / "heldout.txt").read_text(encoding="utf-8")
    assert 20_000 <= len(text) <= 60_000
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_bundled_weights_reach_the_loss_on_their_card(package: SimpleNamespace) -> None:
    log = json.loads((BUNDLED / "training_log.json").read_text(encoding="utf-8"))
    model, tokenizer = package.export.load_model(BUNDLED), package.export.load_tokenizer(BUNDLED)
    chapters = package.corpus.read_text(BUNDLED / "heldout.txt").chapters
    loss = package.evaluate.bits_per_byte(model, tokenizer, chapters)
    assert loss == pytest.approx(log["heldout_txt_bits_per_byte"], abs=1e-3)
    assert f"{log['heldout_txt_bits_per_byte']:.3f} on `heldout.txt`" in (BUNDLED / "README.md").read_text(
        "utf-8"
    )
