"""``kvcache save`` and ``kvcache load``: a conversation in one file, resumed on any backend."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

import ml
from kvcache.commands import app, reported, screen_for
from kvcache.options import (
    BackendName,
    CacheDtype,
    Debug,
    Device,
    Dtype,
    Json,
    MaxTokens,
    ModelPath,
    Precision,
    Seed,
    Temperature,
    TopK,
    TopP,
    device_options,
)
from kvcache.runner.config import ModelConfig, load_config
from kvcache.runner.engine import Engine, EngineOptions, Failed
from kvcache.runner.generate import check_prompt
from kvcache.runner.identity import identity_of
from kvcache.runner.loading import bundled_model, load_model
from kvcache.runner.memory import human_bytes
from kvcache.runner.requests import Finished, Settings
from kvcache.runner.saved import ConversationError, adopt, capture, read, write
from kvcache.runner.tokenizer import Tokenizer
from kvcache.screen import Screen

__all__ = ["load", "save"]


@app.command()
def save(
    prompt: Annotated[str, typer.Option(help="The text that the conversation begins with.")],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    model: ModelPath = None,
    backend: BackendName = "numpy",
    device: Device = None,
    dtype: Dtype = Precision.F32,
    cache_dtype: CacheDtype = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate; 0: the prompt alone.", min=0)] = 0,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compute a prompt, and an answer if asked, and keep the conversation in a file.

    Example: kvcache save --prompt "In the beginning" --max-tokens 32 --out genesis.kv
    """
    with reported(debug):
        settings = Settings(max(1, max_tokens), temperature, top_k, top_p, seed)
        path = bundled_model() if model is None else model
        config, tokenizer = load_config(path), Tokenizer.load(path)
        check_folder(out)
        tokens = check_prompt(tokenizer.encode(prompt), config, config.max_positions)
        stored = (cache_dtype or dtype).dtype
        head: dict[str, Any] = {"model": str(path), "backend": backend, "dtype": dtype.dtype.name}
        screen = screen_for([prompt], as_json, head)
        with opened(path, backend, device, dtype.dtype, screen) as loaded:
            options = options_for(config, len(tokens) + max_tokens, stored)
            with Engine(loaded, tokenizer, options) as engine:
                answer = answered(engine, tokens, settings, screen) if max_tokens else None
                head["saved"] = saved = _saved(engine, answer, tokens, out)
                if answer is not None:
                    screen.finish([answer], engine.statistics, engine.cache_bytes)
        if as_json and not max_tokens:
            typer.echo(json.dumps(head, ensure_ascii=False))
        elif not as_json:
            typer.echo(saved_line(saved))


@app.command()
def load(
    file: Annotated[Path, typer.Argument(help="What kvcache save wrote.")],
    prompt: Annotated[str, typer.Option(help="A text to go on with.", show_default="none")] = "",
    model: ModelPath = None,
    backend: BackendName = "numpy",
    device: Device = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    out: Annotated[
        Path | None, typer.Option(help="Save the conversation anew, to this file.", show_default="no")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Go on with a saved conversation, on any backend: nothing of it is computed again.

    The model has to be the one that it was saved with; weights and cache have the dtypes of then.

    Example: kvcache load genesis.kv --prompt " And God said" --max-tokens 32
    """
    with reported(debug):
        settings = Settings(max_tokens, temperature, top_k, top_p, seed)
        saved = read(file)
        path = bundled_model() if model is None else model
        config, tokenizer = load_config(path), Tokenizer.load(path)
        check_folder(out)
        identity = identity_of(path, saved.dtype)
        if identity != saved.model:
            raise ConversationError(f"{file} is of another model than {path}; name it with --model")
        tokens = [*saved.tokens, *(tokenizer.encode(prompt, bos=False) if prompt else ())]
        check_prompt(tokens, config, config.max_positions)
        if len(tokens) == saved.evaluated:
            raise ConversationError(f"{file}: the conversation came to its end; go on with --prompt")
        head: dict[str, Any] = {"file": str(file), "model": str(path), "backend": backend}
        screen = screen_for([tokenizer.decode(saved.tokens) + prompt], as_json, head)
        with opened(path, backend, device, saved.dtype, screen) as loaded:
            options = options_for(config, len(tokens) + max_tokens, saved.cache_dtype)
            with Engine(loaded, tokenizer, options, identity=identity) as engine:
                adopt(engine, saved)
                answer = answered(engine, tokens, settings, screen)
                if out is not None:
                    head["saved"] = _saved(engine, answer, tokens, out)
                screen.finish([answer], engine.statistics, engine.cache_bytes)
        if "saved" in head and not as_json:
            typer.echo(saved_line(head["saved"]))


@contextmanager
def opened(path: Path, backend: str, device: str | None, dtype: ml.DType, screen: Screen) -> Iterator[Any]:
    """The model on its backend; whatever happens, the screen is put back."""
    try:
        with ml.open_backend(backend, **device_options(device)) as found:
            yield load_model(path, found, dtype, screen.loading)
    except KeyboardInterrupt:
        screen.stop()
        raise KeyboardInterrupt("interrupted; nothing was saved") from None
    finally:
        screen.stop()


def options_for(config: ModelConfig, needed: int, dtype: ml.DType) -> EngineOptions:
    """One conversation of so many tokens, or of what the model takes."""
    capacity = min(config.max_positions, needed)
    return EngineOptions(max_sequences=1, capacity=capacity, cache_dtype=dtype)


def answered(engine: Engine, tokens: Sequence[int], settings: Settings, screen: Screen) -> Finished:
    """The answer to a prompt, shown as it comes."""
    engine.submit(tokens, settings)
    answer: Finished | None = None
    while engine.busy:
        for event in engine.step():
            if isinstance(event, Failed):
                raise event.error
            screen.event(event)
            if isinstance(event, Finished):
                answer = event
    screen.stop()
    assert answer is not None
    return answer


def check_folder(out: Path | None) -> None:
    """Say before anything is computed that a file cannot be written there."""
    if out is not None and not out.expanduser().absolute().parent.is_dir():
        raise ConversationError(f"{out}: there is no folder {out.parent} to write it to")


def _saved(engine: Engine, answer: Finished | None, tokens: Sequence[int], out: Path) -> dict[str, Any]:
    whole = [*tokens, *(answer.tokens if answer is not None else ())]
    size = write(out, capture(engine, whole))
    return {"file": str(out), "tokens": len(whole), "bytes": size}


def saved_line(saved: dict[str, Any]) -> str:
    return f"saved {saved['tokens']} tokens to {saved['file']} ({human_bytes(saved['bytes'])})"
