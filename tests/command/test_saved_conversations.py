"""``kvcache save`` and ``kvcache load``: one file, the same text on every backend, nothing recomputed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import ml
from kvcache_engine.engine import Engine, EngineOptions
from kvcache_engine.loading import bundled_model, load_model
from kvcache_engine.requests import GenerationOptions
from kvcache_engine.saved import ConversationError, SavedConversation, adopt, capture, read, write
from kvcache_engine.tokenizer import Tokenizer
from ml import DType

from ..conftest import one_torch_thread
from ..rigs.each_backend import need_backend
from ..rigs.small_models import KINDS
from .cli_rig import run

Make = Callable[..., Path]
BACKENDS = ("numpy", "torch", "mlx")
SAVED = {**KINDS, "windows": {**KINDS["sliding"], "layer_types": ["sliding_attention"] * 3}}
FIRST, SECOND = 5, 6
"""Tokens before and after the conversation is saved."""


@pytest.fixture(scope="module")
def backends() -> Iterator[dict[str, ml.Backend]]:
    """All that can run here, torch on one thread."""
    found = [info.name for info in ml.available_backends() if info.available and info.name in BACKENDS]
    with contextlib.ExitStack() as stack:
        for name in found:
            stack.enter_context(one_torch_thread(name))
        yield {name: stack.enter_context(ml.open_backend(name)) for name in found}


def engine_of(model: Any, dtype: DType = DType.F32, **options: Any) -> Engine:
    options = {"max_sequences": 2, "capacity": 96, "cache_dtype": dtype, **options}
    return Engine(model, None, EngineOptions(**options))


def go_on(engine: Engine, tokens: Sequence[int], count: int) -> tuple[int, ...]:
    return engine.complete([tokens], GenerationOptions(count, ignore_eos=True))[0].tokens


def check_everywhere(
    folder: Path, backends: dict[str, ml.Backend], prompt: Sequence[int], dtype: DType, path: Path
) -> list[int]:
    """Saved on each backend and resumed on each, or, unless K and V are F32, on the next of them.

    Returns the tokens of the uninterrupted run.
    """
    models = {name: load_model(folder, backend) for name, backend in backends.items()}
    with engine_of(models["numpy"], dtype) as engine:
        expected = go_on(engine, prompt, FIRST + SECOND)
    names = [*backends]
    for source, after in zip(names, names[1:] + names[:1], strict=True):
        with engine_of(models[source], dtype) as engine:
            tokens = [*prompt, *go_on(engine, prompt, FIRST)]
            write(path, capture(engine, tokens))
            assert engine.statistics.computed_tokens == len(prompt)
        for target in names if dtype is DType.F32 else [after]:
            with engine_of(models[target], dtype) as engine:
                saved = read(path)
                adopt(engine, saved)
                tail = go_on(engine, saved.tokens, SECOND)
                assert (*tokens[len(prompt) :], *tail) == expected, f"{source} to {target}"
                assert engine.statistics.reused_tokens == len(tokens) - 1
                assert engine.statistics.computed_tokens == 1
    return [*prompt, *expected]


PLAIN = [DType.F32, DType.F16, DType.Q8_0]


@pytest.mark.parametrize("dtype", PLAIN, ids=lambda dtype: dtype.name)
def test_the_bundled_model_goes_on_on_every_backend(
    backends: dict[str, ml.Backend], tmp_path: Path, dtype: DType
) -> None:
    tokenizer = Tokenizer.load(bundled_model())
    prompt = tokenizer.encode("And the LORD said unto")
    whole = check_everywhere(bundled_model(), backends, prompt, dtype, tmp_path / "c.kv")
    assert tokenizer.decode(whole).startswith("And the LORD said unto ")


@pytest.mark.parametrize("dtype", [DType.F16, DType.Q8_0], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("kind", ["sliding", "recurrent"])
def test_every_kind_of_cache_goes_on_on_every_backend(
    make_model: Make, backends: dict[str, ml.Backend], tmp_path: Path, kind: str, dtype: DType
) -> None:
    """Windows of 8 that have wrapped; recurrent states beside attention."""
    prompt = [int(token) for token in np.random.default_rng(2).integers(3, 250, 21)]
    check_everywhere(make_model(**KINDS[kind]), backends, prompt, dtype, tmp_path / "c.kv")


# One engine, more than one conversation.


def test_what_the_cache_no_longer_holds_is_computed_again(model: Any, tmp_path: Path) -> None:
    prompt = list(range(10, 40))
    with engine_of(model, prefill_chunk=7) as engine:
        tokens = [*prompt, *go_on(engine, prompt, FIRST)]
        kept = capture(engine, tokens, inside=0)
        engine.prefix.clear()
        again = capture(engine, tokens, inside=0)
        assert len(engine.prefix.sessions) == 0
    assert again.tokens == kept.tokens
    assert again.evaluated == kept.evaluated == len(tokens) - 1
    for name, array in kept.pages[0].arrays.items():
        np.testing.assert_allclose(again.pages[0].arrays[name], array, rtol=0, atol=1e-4)


def test_a_saved_conversation_joins_those_that_an_engine_has(model: Any, tmp_path: Path) -> None:
    prompt = list(range(10, 40))
    with engine_of(model) as engine:
        tokens = [*prompt, *go_on(engine, prompt, FIRST)]
        write(tmp_path / "c.kv", capture(engine, tokens))
        expected = go_on(engine, tokens, SECOND)
    with engine_of(model) as engine:
        other = [*prompt[:20], 5, 6, 7]
        told = go_on(engine, other, FIRST)
        adopt(engine, read(tmp_path / "c.kv"))
        adopt(engine, read(tmp_path / "c.kv"))  # a second time changes nothing
        assert go_on(engine, tokens, SECOND) == expected
        (again,) = engine.complete([[*other, *told, 9]], GenerationOptions(1))
        assert again.reused == len(other) + FIRST - 1
        assert len(engine.prefix.sessions) == 0


@pytest.mark.parametrize("kind", SAVED)
def test_a_prompt_that_leaves_a_saved_conversation_finds_what_it_would_have_found(
    make_model: Make, numpy_backend: ml.Backend, tmp_path: Path, kind: str
) -> None:
    model, prompt = load_model(make_model(**SAVED[kind]), numpy_backend), list(range(10, 40))
    with engine_of(model, interval=8) as first, engine_of(model, interval=8) as second:
        whole = [*prompt, *go_on(first, prompt, FIRST)]
        write(tmp_path / "c.kv", capture(first, whole, 1 << 20))
        adopt(second, read(tmp_path / "c.kv"))
        for at in (len(whole) - 1, 29, 26, 13, 5):
            asked, answers = [*whole[:at], 5, 6, 7], []
            for engine in (first, second):
                (answer,) = engine.complete([asked], GenerationOptions(3, ignore_eos=True))
                answers.append((answer.reused, answer.tokens))
            assert answers[0] == answers[1], at


@pytest.mark.parametrize("kind", ["sliding", "recurrent", "windows"])
def test_what_a_file_has_of_positions_inside_is_within_a_bound(
    make_model: Make, numpy_backend: ml.Backend, tmp_path: Path, kind: str
) -> None:
    """The fewer bytes, the further apart they are; the end is there in any case."""
    model, prompt = load_model(make_model(**SAVED[kind]), numpy_backend), list(range(10, 90))
    with engine_of(model, interval=8) as engine:
        whole = [*prompt, *go_on(engine, prompt, FIRST)]
        least, most = (
            write(tmp_path / f"{inside}.kv", capture(engine, whole, inside)) for inside in (0, 1 << 20)
        )
        counts = []
        for inside in (0, (most - least) // 2, 1 << 20):
            saved = capture(engine, whole, inside)
            assert (
                sum(array.nbytes for page in saved.pages for array in page.arrays.values()) <= least + inside
            )
            ends = [page.meta["snapshot"]["end"] for page in saved.pages]
            assert ends[-1] == saved.evaluated
            counts.append(len(ends))
        assert counts[0] == 1 < counts[1] < counts[2]
    with engine_of(model, interval=8) as engine:
        adopt(engine, read(tmp_path / "0.kv"))
        assert engine.complete([whole], GenerationOptions(1))[0].reused == len(whole) - 1
        assert engine.complete([[*whole[:60], 5]], GenerationOptions(1))[0].reused == 0


def test_one_token_is_no_conversation(model: Any) -> None:
    with engine_of(model) as engine, pytest.raises(ConversationError, match="one token"):
        capture(engine, [5])


# Files that are refused.


@pytest.fixture
def saved(make_model: Make, numpy_backend: ml.Backend) -> SavedConversation:
    with engine_of(load_model(make_model(**KINDS["recurrent"]), numpy_backend)) as engine:
        return capture(engine, [*range(10, 20), *go_on(engine, range(10, 20), 3)])


def test_a_file_is_read_as_it_was_written(saved: SavedConversation, tmp_path: Path) -> None:
    """And by safetensors."""
    size = write(tmp_path / "c.kv", saved)
    assert (tmp_path / "c.kv").stat().st_size == size
    assert [path.name for path in tmp_path.glob("c*")] == ["c.kv"]
    names = {f"{i}:{name}" for i, page in enumerate(saved.pages) for name in page.arrays}
    assert load_file(tmp_path / "c.kv").keys() == names
    again = read(tmp_path / "c.kv")
    for name in ("tokens", "evaluated", "model", "cache"):
        assert getattr(again, name) == getattr(saved, name)
    assert (again.dtype, again.cache_dtype) == (DType.F32, "F32")
    assert len(again.pages) == len(saved.pages) > 1
    for page, was in zip(again.pages, saved.pages, strict=True):
        assert page.meta == {"snapshot": was.meta["snapshot"]}
        for name, array in was.arrays.items():
            assert np.array_equal(page.arrays[name], array)


def test_a_flipped_bit_anywhere_is_noticed(saved: SavedConversation, tmp_path: Path) -> None:
    path = tmp_path / "c.kv"
    write(path, saved)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    blanks = {i for i in range(header) if whole[i : i + 1] == b" "}  # padding of the header
    for at in {*range(0, header, 13), *range(header, len(whole), 97), len(whole) - 1} - blanks:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(ConversationError, match=r"c\.kv: "):
            read(path)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": (5, -1, 7)},
        {"tokens": ("a", "b", "c")},
        {"tokens": ()},
        {"evaluated": 2},
        {"evaluated": True},
    ],
    ids=str,
)
def test_fields_that_make_no_sense_are_refused(
    saved: SavedConversation, tmp_path: Path, change: dict[str, Any]
) -> None:
    """Of a file whose digest holds: someone else wrote it."""
    write(tmp_path / "c.kv", dataclasses.replace(saved, **change))
    with pytest.raises(ConversationError, match="invalid fields"):
        read(tmp_path / "c.kv")


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_a_truncated_file_is_noticed(saved: SavedConversation, tmp_path: Path, size: int) -> None:
    write(tmp_path / "c.kv", saved)
    (tmp_path / "c.kv").write_bytes((tmp_path / "c.kv").read_bytes()[:size])
    with pytest.raises(ConversationError, match="damaged"):
        read(tmp_path / "c.kv")


def test_a_write_that_fails_leaves_the_file_of_before(
    saved: SavedConversation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.kv"
    path.write_bytes(b"before")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvcache_engine.saved.os.fsync", fail)
    with pytest.raises(ConversationError, match=r"c\.kv: cannot be written \(No space left on device\)"):
        write(path, saved)
    assert path.read_bytes() == b"before"
    assert [found.name for found in tmp_path.iterdir() if found.is_file()] == ["c.kv"]


def test_another_model_or_cache_is_refused(make_model: Make, numpy_backend: ml.Backend) -> None:
    folder = make_model(**KINDS["full"])
    with engine_of(load_model(folder, numpy_backend)) as engine:
        saved = capture(engine, range(10, 20))
    changed = make_model({"model.norm.weight": np.full((32,), 1.5, np.float32)}, **KINDS["full"])
    for other in (load_model(changed, numpy_backend), load_model(folder, numpy_backend, DType.F16)):
        with engine_of(other) as engine, pytest.raises(ConversationError, match="saved with another model"):
            adopt(engine, saved)
    with (
        engine_of(load_model(folder, numpy_backend), DType.F16) as engine,
        pytest.raises(ConversationError, match=r"'dtype': 'F32'.*'dtype': 'F16'"),
    ):
        adopt(engine, saved)


# The commands.


@functools.cache
def uninterrupted(prompt: str, count: int) -> str:
    """The text of ``kvcache generate``."""
    result = run("generate", "--prompt", prompt, "--max-tokens", count)
    assert result.exit_code == 0, result.stderr
    return str(result.stdout.split("\n\ntokens reused")[0])


PROMPT = "And God said unto Noah,"


@pytest.mark.parametrize("backend", BACKENDS)
def test_load_prints_the_text_of_an_uninterrupted_run(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_backend(backend)
    path, warmed = tmp_path / "noah.kv", []
    monkeypatch.setattr("kvcache_engine.command.saved.warm_up", lambda backend: warmed.append(backend.name))
    first = run("save", "--prompt", PROMPT, "--max-tokens", 10, "--out", path, "--backend", "numpy")
    assert first.exit_code == 0, first.stderr
    assert first.stdout.startswith(uninterrupted(PROMPT, 10) + "\n")
    size = path.stat().st_size / 1024
    assert first.stdout.splitlines()[-1] == f"saved 19 tokens to {path} ({size:.1f} KiB)"
    again = run("load", path, "--max-tokens", 15, "--backend", backend)
    assert again.exit_code == 0, again.stderr
    assert again.stdout.split("\n\ntokens reused")[0] == uninterrupted(PROMPT, 25)
    assert "tokens reused     18\ntokens computed   1\n" in again.stdout
    assert warmed == ["numpy", backend], "its seconds would be those of the prefill"


def test_a_saved_prompt_is_gone_on_with_by_several(tmp_path: Path) -> None:
    path, other = tmp_path / "god.kv", tmp_path / "longer.kv"
    result = run("save", "--prompt", "And God said", "--out", path, "--json", "--cache-dtype", "q8_0")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["saved"]["tokens"] == 4
    for more in (" unto Noah,", " unto Moses,"):
        arguments = ("--prompt", more, "--max-tokens", 5, "--json", "--out", other)
        record = json.loads(run("load", path, *arguments).stdout)
        (answer,) = record["outputs"]
        assert (answer["prompt"], answer["reused"]) == (f"And God said{more}", 3)
        assert record["saved"] == {
            "file": str(other), "tokens": 5 + answer["prompt_tokens"], "bytes": other.stat().st_size
        }  # fmt: skip
        assert len(read(other).tokens) == record["saved"]["tokens"]
        assert read(other).cache_dtype == "Q8_0"


def test_a_conversation_that_came_to_its_end_needs_a_prompt(make_model: Make, tmp_path: Path) -> None:
    """The model says its end-of-sequence token next: nothing of the conversation is left to evaluate."""
    folder, path = make_model(**KINDS["full"]), tmp_path / "c.kv"
    with engine_of(load_model(folder, ml.open_backend("numpy"))) as engine:
        (token,) = go_on(engine, [1, 10, 11], 1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": token}))
    arguments = ("--prompt", bytes([10 - 3 + 33, 11 - 3 + 33]).decode(), "--model", folder)
    result = run("save", *arguments, "--max-tokens", 5, "--out", path, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["outputs"][0]["reason"] == "stop"
    result = run("load", path, "--model", folder)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "has ended; continue it with --prompt" in result.stderr
    result = run("load", path, "--model", folder, "--prompt", "ab", "--max-tokens", 2, "--json")
    assert json.loads(result.stdout)["outputs"][0]["reused"] == 3
