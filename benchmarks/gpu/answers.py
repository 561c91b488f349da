"""Stage d: what models say, greedy, is what they say on NumPy; layers over a CPU and a GPU too."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml
from benchmarks.gpu.record import Skipped, Stage, needs, needs_backend
from benchmarks.gpu.suites import device_of
from benchmarks.models import STORIES
from kvcache_engine import (
    EngineOptions,
    GenerationOptions,
    Generator,
    Tokenizer,
    bundled_model,
    load_config,
    load_model,
)
from kvcache_engine.device_map import open_on_devices
from kvcache_engine.testing.answers import PROMPT

PROMPTS = (PROMPT, PROMPT[:15], PROMPT[:11], PROMPT[:6])
"""One by one, and all at once: the second way reads what several sequences of different lengths hold."""


def answers(
    backend: ml.Backend, folder: Path, prompts: Sequence[Sequence[int]], new: int
) -> list[tuple[int, ...]]:
    options = EngineOptions(max_sequences=len(prompts), capacity=256)
    with Generator(load_model(folder, backend), None, options=options) as generator:
        settings = GenerationOptions(max_new_tokens=new, ignore_eos=True)
        return [answer.tokens for answer in generator.complete(prompts, settings)]


@functools.cache
def expected(folder: Path, count: int, new: int) -> list[tuple[int, ...]]:
    with ml.open_backend("numpy") as backend:
        return answers(backend, folder, PROMPTS[:count], new)


def compare(stage: Stage, backend: ml.Backend, folder: Path) -> None:
    """Hold tokens to NumPy's."""
    new = 8 if stage.quick else 60
    for count in (1, len(PROMPTS)):
        wanted, found = expected(folder, count, new), answers(backend, folder, PROMPTS[:count], new)
        same = [sum(a == b for a, b in zip(*pair, strict=True)) for pair in zip(wanted, found, strict=True)]
        stage.note(f"{count} at once: tokens of {new} that are NumPy's", same)
        for pair in zip(wanted, found, strict=True):
            assert pair[0] == pair[1], f"NumPy's tokens, and those found: {pair}"


def bundled(stage: Stage, name: str) -> None:
    needs_backend(name)
    needs("safetensors", "tokenizers")
    with ml.open_backend(name, device=device_of(stage, name)) as backend:
        compare(stage, backend, bundled_model())


def known_text(stage: Stage, name: str) -> None:
    """stories260K's 200 tokens, as its README has them."""
    folder = stage.options.stories or STORIES
    if stage.options.stories is None and not folder.is_dir():
        raise Skipped(f"{folder} is not here; name a folder of stories260K with --stories")
    text = (folder / "README.md").read_text(encoding="utf-8").split("against:\n\n")[1].strip("\n")
    needs_backend(name)
    needs("safetensors", "tokenizers")
    with ml.open_backend(name, device=device_of(stage, name)) as backend:
        options = EngineOptions(max_sequences=1, capacity=256)
        with Generator(load_model(folder, backend), Tokenizer.load(folder), options=options) as generator:
            (answer,) = generator.complete([""], GenerationOptions(200))
    stage.note("tokens", len(answer.tokens))
    stage.note("text", answer.text)
    assert answer.text == text, "the text is another one than the README's"


def over_devices(stage: Stage, names: Sequence[str]) -> None:
    needs("safetensors", "tokenizers")
    with open_on_devices("torch", names, load_config(bundled_model())) as backend:
        stage.note("devices", [device.name for device in backend.devices])
        compare(stage, backend, bundled_model())


def split(stage: Stage) -> None:
    needs_backend("torch")
    over_devices(stage, ["cpu:0", "cpu:1" if stage.options.device == "cpu" else stage.options.device])


STEPS: dict[str, Any] = {
    f"{what.__name__.replace('_', ' ')}, {name}": functools.partial(what, name=name)
    for what in (bundled, known_text) for name in ("torch", "cupy")
} | {"layers over CPU and device": split}  # fmt: skip
