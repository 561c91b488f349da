"""``kvcache save`` and ``kvcache load``: a conversation in one file, resumed on any backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

import ml
from kvcache import bytes_text
from kvcache.cache import CacheDType
from kvcache_engine.command.answers import tell_full
from kvcache_engine.command.completing import conversations
from kvcache_engine.command.grouped import ungrouped
from kvcache_engine.command.json_output import print_json
from kvcache_engine.command.options import Debug, Dtypes, Json, MaxTokens, Place, Quiet, Sampling
from kvcache_engine.command.progress import bars_until_done
from kvcache_engine.command.prompts import text_or_stdin
from kvcache_engine.command.reporting import reported
from kvcache_engine.command.screen import Screen, screen_for
from kvcache_engine.config import ModelSizes
from kvcache_engine.engine import Engine, EngineOptions, Failed
from kvcache_engine.fingerprint import model_identity
from kvcache_engine.language_model import check_prompt, encode_prompt
from kvcache_engine.requests import Finished, GenerationOptions
from kvcache_engine.runtimes import runtime_of
from kvcache_engine.saved import ConversationError, adopt, capture, check_target, read, write
from kvcache_engine.tokenizer import Tokenizer
from kvcache_engine.warm_up import warm_up

__all__ = ["load", "save"]


@ungrouped
def save(
    prompt: Annotated[str, typer.Option(help="The beginning of the conversation. -: standard input.")],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    *,
    place: Place,
    dtypes: Dtypes,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate; 0: only the prompt.", min=0)] = 0,
    sampling: Sampling,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Compute a prompt, and optionally an answer, and save the conversation to a file.

    Example: kvcache save --prompt "In the beginning" --max-tokens 32 --out genesis.kv
    """
    with reported(debug):
        settings, path = sampling.settings(max(1, max_tokens), place.path), place.path
        head: dict[str, Any] = {
            "model": str(path),
            "backend": place.backend_name,
            "dtype": dtypes.weights.name,
        }
        tokenizer = Tokenizer.load(path)
        check_target(out)
        prompt = text_or_stdin(prompt)
        screen = screen_for([prompt], as_json, head, quiet)
        with opened(place, dtypes.weights, screen, head) as loaded:
            tokens = encode_prompt(tokenizer, prompt, loaded.config, loaded.config.max_positions)
            options = options_for(loaded.config, len(tokens) + max_tokens, dtypes.cache)
            with Engine(loaded, tokenizer, options) as engine:
                answer = answered(engine, tokens, settings, screen) if max_tokens else None
                head["saved"] = saved = _saved(engine, answer, tokens, out)
                if answer is not None:
                    finish(screen, answer, engine)
        if as_json and not max_tokens:
            print_json({**head, "outputs": [], "statistics": None})
        elif not as_json and not quiet:
            typer.echo(saved_line(saved))


@ungrouped
def load(
    file: Annotated[
        Path, typer.Argument(help="A file written by kvcache save.", autocompletion=conversations)
    ],
    prompt: Annotated[
        str, typer.Option(help="A text to add before generating. -: standard input.", show_default="none")
    ] = "",
    *,
    place: Place,
    max_tokens: MaxTokens = 128,
    sampling: Sampling,
    out: Annotated[Path | None, typer.Option(help="Save the continued conversation to this file.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Continue a saved conversation, on any backend, without computing it again.

    The model must be the one with which it was saved. The --runtime must be the same, or one that is known to
    compute the same keys and values. Weights and cache get the dtypes with which it was saved.

    Example: kvcache load genesis.kv --prompt " And God said" --max-tokens 32
    """
    with reported(debug):
        settings, path = sampling.settings(max_tokens, place.path), place.path
        prompt = text_or_stdin(prompt)
        with bars_until_done(as_json or quiet) as bars:
            saved = read(file, bars.reading)
        head: dict[str, Any] = {"file": str(file), "model": str(path), "backend": place.backend_name}
        tokenizer = Tokenizer.load(path)
        if out is not None:
            check_target(out)
        screen = screen_for([tokenizer.decode(saved.tokens) + prompt], as_json, head, quiet)
        with opened(place, saved.dtype, screen, head) as loaded:
            config, identity = loaded.config, model_identity(loaded)
            if identity != saved.model:
                theirs, own = runtime_of(saved.model), runtime_of(identity)
                raise ConversationError(
                    f"{file} was saved with another model than {path}: its config.json or weights differ; "
                    "name the original with --model"
                    if theirs is own
                    else f"{file} is of a model that runs in {theirs.value}, and {path} runs in {own.value}; "
                    f"use --runtime {theirs.value}, and the original --model"
                )
            tokens = [*saved.tokens, *tokenizer.encode_more(prompt, config.max_positions)]
            check_prompt(tokens, config, config.max_positions)
            if len(tokens) == saved.evaluated:
                raise ConversationError(f"{file}: the conversation has ended; continue it with --prompt")
            options = options_for(config, len(tokens) + max_tokens, saved.cache_dtype)
            with Engine(loaded, tokenizer, options, identity=identity) as engine:
                with bars_until_done(as_json or quiet) as bars:
                    bars.wait("restoring")
                    adopt(engine, saved)
                answer = answered(engine, tokens, settings, screen)
                if out is not None:
                    head["saved"] = _saved(engine, answer, tokens, out)
                finish(screen, answer, engine)
        if "saved" in head and not as_json and not quiet:
            typer.echo(saved_line(head["saved"]))


@contextmanager
def opened(place: Place, dtype: ml.DType, screen: Screen, head: Mapping[str, Any]) -> Iterator[Any]:
    """The model, on its backend. The screen is always restored. After Ctrl-C, reports whether the file was
    written: ``head`` then contains "saved".
    """
    try:
        with place.loaded(dtype, screen.loading) as model:
            warm_up(model.backend)
            yield model
    except KeyboardInterrupt:
        screen.stop()
        file = head.get("saved", {}).get("file")
        raise KeyboardInterrupt(f"interrupted; {file or 'nothing'} was saved") from None
    finally:
        screen.stop()


def options_for(config: ModelSizes, needed: int, dtype: CacheDType) -> EngineOptions:
    """Options for one conversation with this many tokens, or with the model's maximum."""
    capacity = min(config.max_positions, needed)
    return EngineOptions(max_sequences=1, capacity=capacity, cache_dtype=dtype)


def answered(engine: Engine, tokens: Sequence[int], settings: GenerationOptions, screen: Screen) -> Finished:
    """The answer to a prompt, shown as it is generated."""
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


def finish(screen: Screen, answer: Finished, engine: Engine) -> None:
    screen.finish(engine.statistics, engine.cache_bytes)
    tell_full([answer], engine.limit, engine.model.config.max_positions)


def _saved(engine: Engine, answer: Finished | None, tokens: Sequence[int], out: Path) -> dict[str, Any]:
    whole = [*tokens, *(answer.tokens if answer is not None else ())]
    size = write(out, capture(engine, whole))
    return {"file": str(out), "tokens": len(whole), "bytes": size}


def saved_line(saved: dict[str, Any]) -> str:
    return f"saved {saved['tokens']} tokens to {saved['file']} ({bytes_text(saved['bytes'])})"
