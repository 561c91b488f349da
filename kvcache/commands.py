"""The commands of ``kvcache``: what they take, and what they call."""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import ml
from kvcache.cli import INTERRUPTED
from kvcache.runner.config import load_config
from kvcache.runner.generate import Generator, GeneratorOptions, check_prompt
from kvcache.runner.loading import bundled_model, load_model
from kvcache.runner.memory import check_memory
from kvcache.runner.requests import Finished, Settings
from kvcache.runner.tokenizer import Tokenizer
from kvcache.runner.weights import parameter_count
from kvcache.screen import JsonScreen, LiveScreen, PlainScreen, Screen
from kvcache.survey import listing, plain, record, survey

__all__ = ["Precision", "app"]

MAX_SEQUENCES = 16
"""Prompts that run at the same time; further ones wait for a free sequence."""

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


class Precision(StrEnum):
    """The dtypes that weights and caches are held in."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"

    @property
    def dtype(self) -> ml.DType:
        return ml.DType[self.name]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(package_version("ml-kvcache"))
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
]


@app.callback()
def kvcache(version: Version = False) -> None:
    """The KV cache of an inference engine, on NumPy, PyTorch, CuPy, MLX and your own backend."""


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the trace of an error.")]


@app.command()
def backends(as_json: Json = False, debug: Debug = False) -> None:
    """List the backends that were found, what they offer, and how to install the others.

    Each one that can run is opened for a moment, to ask it for its memory and capabilities.

    Example: kvcache backends --json
    """
    with reported(debug):
        rows = survey()
        if as_json:
            typer.echo(json.dumps([record(row) for row in rows], indent=2))
        elif sys.stdout.isatty():
            Console(highlight=False).print(listing(rows))
        else:
            typer.echo("\n".join(plain(rows)))


@app.command()
def generate(
    prompt: Annotated[list[str], typer.Option(help="A text to continue; give several for a batch.")],
    model: Annotated[
        Path | None,
        typer.Option(help="A Hugging Face folder or .gguf file.", show_default="the bundled model"),
    ] = None,
    backend: Annotated[str, typer.Option(help="See: kvcache backends.", envvar="ML_BACKEND")] = "numpy",
    device: Annotated[str | None, typer.Option(help="As the backend names it: cpu, cuda, mps ...")] = None,
    dtype: Annotated[Precision, typer.Option(help="Of weights and activations.", case_sensitive=False)] = (
        Precision.F32
    ),
    cache_dtype: Annotated[
        Precision | None,
        typer.Option(help="Of keys and values.", case_sensitive=False, show_default="--dtype"),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Per prompt.", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0)] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0: all.", min=0)] = 0,
    top_p: Annotated[
        float, typer.Option(help="Keep the likeliest up to this probability.", min=0, max=1)
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.", min=0)] = None,
    capacity: Annotated[
        int | None, typer.Option(help="Tokens per sequence.", min=1, show_default="what the prompts need")
    ] = None,
    prefill_chunk: Annotated[int, typer.Option(help="Prompt tokens per forward pass.", min=1)] = 512,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the text; repeatable.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Continue prompts with a Llama-family model; prompts that begin alike share their cache.

    Example: kvcache generate --prompt "In the beginning" --max-tokens 64
    """
    with reported(debug):
        settings = Settings(max_tokens, temperature, top_k, top_p, seed, tuple(stop or ()))
        options = {} if device is None else {"device": device}
        path = bundled_model() if model is None else model
        load_config(path)  # a wrong path is told at once: opening a backend may take seconds
        cache = GeneratorOptions(
            max_sequences=min(len(prompt), MAX_SEQUENCES),
            capacity=capacity,
            prefill_chunk=prefill_chunk,
            cache_dtype=(cache_dtype or dtype).dtype,
        )
        screen = _screen(prompt, as_json, {"model": str(path), "backend": backend, "dtype": dtype.dtype.name})
        with ml.open_backend(backend, **options) as opened:
            _generate(opened, path, dtype.dtype, prompt, settings, cache, screen)


def _generate(
    backend: ml.Backend,
    path: Path,
    dtype: ml.DType,
    prompts: Sequence[str],
    settings: Settings,
    options: GeneratorOptions,
    screen: Screen,
) -> None:
    """Everything is checked before the weights are loaded; whatever happens, the screen is put back."""
    tokenizer, options = _prepare(backend, path, dtype, prompts, settings, options)
    answers: list[Finished] = []
    generated = 0
    try:
        model = load_model(path, backend, dtype, screen.loading)
        with (
            Generator(model, tokenizer, options=options) as generator,
            contextlib.closing(generator.generate(prompts, settings)) as events,
        ):
            for event in events:
                screen.event(event)
                generated = generator.statistics.generated_tokens
                if isinstance(event, Finished):
                    answers.append(event)
            totals, cache_bytes = generator.statistics, generator.cache_bytes
    except KeyboardInterrupt:
        screen.stop()
        raise KeyboardInterrupt(f"interrupted after {generated} tokens; the cache is released") from None
    finally:
        screen.stop()
    screen.finish(sorted(answers, key=lambda answer: answer.request), totals, cache_bytes)


def _prepare(
    backend: ml.Backend,
    path: Path,
    dtype: ml.DType,
    prompts: Sequence[str],
    settings: Settings,
    options: GeneratorOptions,
) -> tuple[Tokenizer, GeneratorOptions]:
    """The tokenizer, and the options with the capacity that the prompts need where none was given."""
    config = load_config(path)
    weights = parameter_count(config) * dtype.itemsize
    if options.capacity is not None:  # before the prompts: it needs the config alone
        sizes = (options.cache_dtype, options.max_sequences, options.capacity)
        check_memory(config, backend, *sizes, weights)
    tokenizer = Tokenizer.load(path)
    limit = options.capacity or config.max_positions
    longest = max(len(check_prompt(tokenizer.encode(text), config, limit)) for text in prompts)
    if options.capacity is None:
        needed = min(config.max_positions, longest + settings.max_new_tokens)
        options = replace(options, capacity=needed)
        check_memory(config, backend, options.cache_dtype, options.max_sequences, needed, weights)
    return tokenizer, options


def _screen(prompts: Sequence[str], as_json: bool, head: dict[str, Any]) -> Screen:
    if as_json:
        return JsonScreen(prompts, head)
    console = Console(highlight=False, soft_wrap=False)
    return LiveScreen(prompts, console) if console.is_terminal else PlainScreen(prompts)


@contextlib.contextmanager
def reported(debug: bool) -> Iterator[None]:
    """Errors as one line on stderr and exit code 1; Ctrl-C as a short message and 130."""
    try:
        yield
    except KeyboardInterrupt as error:
        typer.echo(f"kvcache: {str(error) or 'interrupted'}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except (typer.Exit, BrokenPipeError):
        raise
    except Exception as error:
        if debug:
            traceback.print_exc()
        typer.echo(f"kvcache: {_one_line(error)}", err=True)
        raise typer.Exit(1) from None


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, ml.MLError):
        return text
    if isinstance(error, MemoryError):
        return f"out of memory{f' ({text})' if text else ''}; use a smaller --capacity or a narrower --dtype"
    return f"{type(error).__name__}: {text}; --debug shows where"
