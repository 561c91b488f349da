"""``kvcache inspect``: a picture of a store, a saved conversation, or a running cache."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qsl

import typer
from rich.console import Console
from rich.live import Live

import ml
from kvcache import HostTier, bytes_text
from kvcache.stores import SnapshotFile, StoreFolder, files_digest, parse_bytes, path_of
from kvcache.views import Picture, Watched, look_at_page, look_at_store, render
from kvcache.views.words import Decode
from kvcache_engine.command.completing import stores_and_conversations
from kvcache_engine.command.json_output import print_json
from kvcache_engine.command.options import (
    BackendName,
    Debug,
    Device,
    Json,
    ModelPath,
    Place,
    Quiet,
    RuntimeName,
)
from kvcache_engine.command.progress import Bars, bars_until_done, draws
from kvcache_engine.command.reporting import reported
from kvcache_engine.engine import Engine, EngineOptions, Failed
from kvcache_engine.errors import RunnerError
from kvcache_engine.language_model import encode_prompt
from kvcache_engine.loading import bundled_model
from kvcache_engine.requests import Event, GenerationOptions
from kvcache_engine.saved import write_whole
from kvcache_engine.tokenizer import Tokenizer

__all__ = ["demonstrate", "inspect", "look_at", "show", "write_page"]

HOST_BUDGET = 256 << 20
"""The host memory for snapshots of a demonstration, in bytes."""
_SPARE = 4
"""Free tokens of each sequence in a demonstration."""


def inspect(
    target: Annotated[
        str | None,
        typer.Argument(
            help="A store's folder or file:// URL, or a saved conversation.",
            autocompletion=stores_and_conversations,
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Run this prompt and draw the cache; repeatable.")
    ] = None,
    model: ModelPath = None,
    backend: BackendName = "numpy",
    device: Device = None,
    runtime: RuntimeName = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate per prompt.", min=1)] = 8,
    budget: Annotated[
        str | None,
        typer.Option(help="Bytes that the store, or the snapshots of the run, may use: 10GiB, for example."),
    ] = None,
    nodes: Annotated[int, typer.Option(help="Maximum number of nodes or entries to draw.", min=0)] = 100,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a self-contained HTML page.", show_default="no")
    ] = None,
    as_json: Json = False,
    as_text: Annotated[bool, typer.Option("--text", help="Print plain text, without colours.")] = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Draw the entries of a store, a saved conversation, or the radix tree and cells of a run.

    A store is only read: nothing in it is swept, evicted or marked as used.

    Example: kvcache inspect --prompt "In the beginning" --prompt "In the land" --html cache.html
    """
    with reported(debug):
        limit = parse_bytes(budget, "--budget")
        if (target is None) == (not prompt):
            raise typer.BadParameter("give a store, a saved conversation, or --prompt TEXT")
        console = None if as_json or as_text or not draws(sys.stdout) else Console(highlight=False)
        if target is not None:
            with bars_until_done(as_json or quiet) as bars:
                picture = look_at(target, limit, nodes, model, bars)
        else:
            place = Place(model, backend, device, runtime=runtime)
            with bars_until_done(as_json or quiet) as bars:
                picture = demonstrate(place, prompt or [], max_tokens, limit, nodes, console, bars)
        size = None if html is None else write_page(picture, html)
        show(picture, console, as_json)
        if size is not None and not quiet:
            typer.echo(f"wrote {html} ({bytes_text(size)})", err=True)


def look_at(
    target: str, budget: int | None, entries: int, model: Path | None = None, bars: Bars | None = None
) -> Picture:
    """The picture of a store's folder, or of a file, with its text if its model is known."""
    if target.startswith("file:"):
        url, _, query = target.partition("?")
        target = path_of(url)
        if budget is None:
            budget = parse_bytes(dict(parse_qsl(query)).get("budget"), "inspect: budget")
    elif "://" in target:
        raise RunnerError(f"inspect: {target}: only a store in a folder can be inspected")
    path = Path(target).expanduser()
    if path.is_dir() or StoreFolder.is_store(path):
        return look_at_store(path, budget, entries, (bars or Bars(None)).checked)
    if not path.exists():
        raise RunnerError(f"inspect: {path}: there is no such file or folder")
    return look_at_page(path, _decoder(path, model))


def _decoder(path: Path, model: Path | None) -> Decode | None:
    """The decoder of the named model, or of the bundled one if that computed the entry."""
    if model is not None:
        return Tokenizer.load(model).decode
    bundled = bundled_model()
    record = SnapshotFile.of(path).open().meta.get("model")
    ours = isinstance(record, Mapping) and record.get("files") == files_digest(bundled)
    return Tokenizer.load(bundled).decode if ours else None


def demonstrate(
    place: Place,
    prompts: Sequence[str],
    max_tokens: int,
    budget: int | None,
    nodes: int,
    console: Console | None,
    bars: Bars | None = None,
) -> Picture:
    """Generate for all prompts over one PrefixCache; only the last is still running in the picture."""
    bars = bars or Bars(None)
    tokenizer = Tokenizer.load(place.path)
    with place.loaded(ml.DType.F32, bars.loading) as loaded:
        config = loaded.config
        tokens = [encode_prompt(tokenizer, text, config, config.max_positions) for text in prompts]
        longest = max(map(len, tokens))
        capacity = min(config.max_positions, longest + max_tokens + _SPARE)
        options = EngineOptions(max_sequences=max(2, min(4, len(prompts))), capacity=capacity, budget=budget)
        with Engine(loaded, tokenizer, options, [HostTier(HOST_BUDGET)]) as engine:

            def take() -> Picture:
                return render(engine.prefix, tokenizer.decode, nodes)

            if console is None:
                return _run(engine, tokens, max_tokens, take, bars.event)
            watched = Watched(take)
            with Live(watched, console=console, transient=True, auto_refresh=False) as live:
                return _run(engine, tokens, max_tokens, take, lambda event: live.refresh())


def _run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    take: Callable[[], Picture],
    listener: Callable[[Event], None],
) -> Picture:
    """Run one request after another, so that each reuses earlier ones; the last one stays open."""
    picture: Picture | None = None
    for i, tokens in enumerate(prompts):
        engine.submit(tokens, GenerationOptions(max_tokens))
        while engine.busy:
            for event in engine.step():
                if isinstance(event, Failed):
                    raise event.error
                listener(event)
            if engine.running and i == len(prompts) - 1:
                picture = take()
    return picture or take()


def write_page(picture: Picture, path: Path) -> int:
    """Write the page atomically, or directly to a device or pipe; returns its size in bytes."""
    page, target = picture.html().encode(), path.expanduser()
    try:
        if target.exists() and not target.is_file():
            return target.write_bytes(page)
        write_whole(target, [memoryview(page)])
    except OSError as error:
        raise RunnerError(f"inspect: {path}: cannot be written ({error.strerror or error})") from error
    return len(page)


def show(picture: Picture, console: Console | None, as_json: bool = False) -> None:
    """Print in colours on a terminal, else as plain text or JSON."""
    if as_json:
        print_json(picture.record())
    elif console is not None:
        console.print(picture)
    else:
        typer.echo(picture.text())
