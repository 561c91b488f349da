"""examples/train_tiny: the pipeline on a little text, its parts, and loading the result by transformers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", minversion="2.9", reason="examples/train_tiny needs torch >= 2.9 (its Muon)")
pytest.importorskip("tokenizers", reason="examples/train_tiny needs tokenizers")
pytest.importorskip("safetensors", reason="examples/train_tiny needs safetensors")

import torch
from tokenizers import Tokenizer

from examples.train_tiny import card, text, train

BUNDLED = Path(__file__).resolve().parents[2] / "kvcache_engine" / "tiny"
WORDS = ["and", "the", "LORD", "said", "unto", "Moses", "speak", "children", "of", "Israel", "bread", "day"]


@pytest.fixture(scope="module", autouse=True)
def unchanged() -> Iterator[None]:
    """The command sets torch's threads and seed, and its samples are short here."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(card, "SAMPLE_TOKENS", 3)
        yield
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


def run(folder: Path, out: str = "out") -> int:
    return train.main(
        ["--text", f"{folder / 'text.txt'}", "--steps=2", "--batch=1", "--out", f"{folder / out}"]
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 chapters of seven verses of twelve words, the first line of each names it; two steps."""
    folder, choose = tmp_path_factory.mktemp("train_tiny"), random.Random(0)
    chapters = [
        "\n".join([f"Chapter {i + 1}."] + [" ".join(choose.choices(WORDS, k=12)) + "." for _ in range(7)])
        for i in range(40)
    ]
    (folder / "text.txt").write_text("\n\n".join(chapters) + "\n", encoding="utf-8")
    assert run(folder) == 0
    return folder / "out"


def test_all_files_are_written_and_the_card_reports_the_run(trained: Path) -> None:
    assert {path.name for path in trained.iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md",
        "heldout.txt", "training_log.json",
    }  # fmt: skip
    log = json.loads((trained / "training_log.json").read_text(encoding="utf-8"))
    assert [step for step, _, _ in log["points"]] == [2]
    written = (trained / "README.md").read_text(encoding="utf-8")
    assert f"**{log['heldout_bits_per_byte']:.3f} bits per byte**" in written
    assert "4 layers of width 192, SwiGLU of 416, 6 query heads and 2 KV heads of 32," in written
    assert written.count("| step | training, nats per token |") == 1
    assert (trained / "heldout.txt").read_text(encoding="utf-8").startswith("Chapter 20.\n")


def test_training_is_reproducible(trained: Path) -> None:
    assert run(trained.parent, "again") == 0
    for name in ("model.safetensors", "tokenizer.json", "heldout.txt"):
        assert (trained.parent / "again" / name).read_bytes() == (trained / name).read_bytes()


def test_transformers_computes_the_same_logits(trained: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    theirs = transformers.LlamaForCausalLM.from_pretrained(trained, dtype=torch.float32)
    assert (theirs.config.bos_token_id, theirs.config.eos_token_id) == (1, 2)
    tokens = torch.arange(3, 203).view(2, 100)
    with torch.no_grad():
        ours = train.load_model(trained)(tokens)
        torch.testing.assert_close(ours, theirs(tokens).logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "words", ["And God said,\nLet there be light.", "  two  spaces\t\r\n\n", "żółw 🐢 \u0000", ""]
)
def test_tokenizer_round_trip(trained: Path, words: str) -> None:
    tokenizer = Tokenizer.from_file(str(trained / "tokenizer.json"))
    ids = tokenizer.encode(words).ids
    assert ids[0] == text.BOS
    assert tokenizer.decode(ids) == words


def test_windows_start_at_verses_and_cover_an_epoch() -> None:
    newline, length = 9, 8
    chapters = [np.array([10, 11, newline, 12, 13, 14, newline, 15, 16, 17]) for _ in range(20)]
    windows = text.Windows(chapters, newline, length, seed=0)
    inputs, targets = next(windows.batches(4))
    assert inputs[:, 0].tolist() == [text.BOS] * 4
    assert inputs[:, 1:].equal(targets[:, :-1])
    assert set(targets[:, 0].tolist()) <= {10, 12, 15}
    seen = {position for start in windows.epoch() for position in range(start, start + length)}
    assert len(seen) > 0.7 * len(windows.stream)


def test_verses_are_parsed() -> None:
    printed = "Ge1:1 In the beginning.\n1Sm2:10 The adversaries.\n\nPsa119:176 I have gone astray.\n"
    expected = [("Ge1", "In the beginning."), ("1Sm2", "The adversaries."), ("Psa119", "I have gone astray.")]
    assert text.parse_verses(printed) == expected


def test_without_the_bible_program_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(text.TrainTinyError, match="apt-get install -y bible-kjv bible-kjv-text"):
        text.read_bible()


@pytest.mark.parametrize(
    ("content", "message"),
    [("one chapter\n", "at least 2 are needed"), ("a b c\n\nd e f\n", "the training text has")],
)
def test_bad_text_is_one_line_and_exit_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    (tmp_path / "text.txt").write_text(content, encoding="utf-8")
    assert run(tmp_path) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert message in said
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_written_is_told_before_training(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "make_optimizers", lambda model: pytest.fail("it trains"))
    assert run(trained.parent, "text.txt") == 1
    said = capsys.readouterr().err
    assert said == f"train_tiny: --out {trained.parent / 'text.txt'}: File exists; give a folder\n"


def test_the_bundled_folder_is_small_and_its_tokenizer_round_trips_its_text() -> None:
    assert sum(path.stat().st_size for path in BUNDLED.iterdir()) <= 4_000_000
    words = (BUNDLED / "heldout.txt").read_text(encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    assert 20_000 <= len(words) <= 60_000
    assert tokenizer.decode(tokenizer.encode(words).ids) == words


def test_bundled_weights_reach_the_loss_on_their_card() -> None:
    log = json.loads((BUNDLED / "training_log.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    chapters = text.read_text(BUNDLED / "heldout.txt").chapters
    loss = card.bits_per_byte(train.load_model(BUNDLED), tokenizer, chapters)
    assert loss == pytest.approx(log["heldout_txt_bits_per_byte"], abs=1e-3)
    written = (BUNDLED / "README.md").read_text(encoding="utf-8")
    assert f"{log['heldout_txt_bits_per_byte']:.3f} on `heldout.txt`" in written
