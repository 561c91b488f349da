"""The commands of ``kvcache``: what they take, and what they call."""

from __future__ import annotations

import contextlib
import errno
import logging
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import ml
from kvcache.command.answers import tell_full
from kvcache.command.backends import listing, plain, record, survey
from kvcache.command.completing import mend_zsh
from kvcache.command.grouped import ungrouped
from kvcache.command.json_output import print_json
from kvcache.command.main import INTERRUPTED
from kvcache.command.options import (
    BackendName,
    Debug,
    Device,
    Dtypes,
    Json,
    Place,
    Precision,
    Quiet,
    Sampling,
    TensorParallel,
    Timeout,
    device_options,
)
from kvcache.command.progress import draws
from kvcache.command.prompts import gathered
from kvcache.command.screen import Screen, screen_for
from kvcache.command.usage import CommandGroup, one_line
from kvcache.runner.errors import RequestError
from kvcache.runner.generate import Generator, GeneratorOptions, encode_prompt
from kvcache.runner.loading import load_config, load_model
from kvcache.runner.memory import check_memory
from kvcache.runner.models.families import family_of, parameter_count
from kvcache.runner.requests import Finished, Settings
from kvcache.runner.tokenizer import Tokenizer

__all__ = ["app", "continue_prompts", "reported"]

MAX_SEQUENCES = 16
"""Prompts that run at the same time; further ones wait for a free sequence."""

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
LISTING_WIDTH = 60
"""Columns that the backends' listing needs; in fewer, its lines are left to the terminal to wrap."""

app = typer.Typer(
    name="kvcache",
    cls=CommandGroup,
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
    epilog='Example: kvcache generate --prompt "In the beginning"',
)


mend_zsh()


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


@app.command()
def backends(as_json: Json = False, debug: Debug = False) -> None:
    """List the backends that were found, what they offer, and how to install the others.

    Each one that can run is opened for a moment, to ask it for its memory and capabilities.

    Example: kvcache backends --json
    """
    with reported(debug):
        rows = survey()
        if as_json:
            print_json([record(row) for row in rows])
        elif draws(sys.stdout) and (console := Console(highlight=False)).width >= LISTING_WIDTH:
            console.print(listing(rows))
        else:
            typer.echo("\n".join(plain(rows)))


@app.command()
def bench(
    backend: BackendName = "numpy",
    device: Device = None,
    dtype: Annotated[Precision, typer.Option(help="Of keys and values.", case_sensitive=False)] = (
        Precision.F32
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer lengths and rounds.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure put and get on this machine, beside code by hand and other caches where they are installed.

    Example: kvcache bench --backend torch --quick
    """
    with reported(debug):
        from kvcache.bench.decoding import measure, shown

        with ml.open_backend(backend, **device_options(device)) as opened:
            rows = measure(opened, dtype.dtype, quick)
            if as_json:
                print_json([row.as_dict() for row in rows])
            else:
                for row in rows:
                    typer.echo(shown(row))


@app.command()
@ungrouped
def generate(
    prompt: Annotated[
        list[str] | None, typer.Option(help="A text to continue; several are a batch. -: standard input.")
    ] = None,
    prompt_file: Annotated[
        list[Path] | None, typer.Option(help="A file that is one prompt; repeatable. -: standard input.")
    ] = None,
    prompt_lines: Annotated[
        list[Path] | None, typer.Option(help="A file with a prompt in each line. -: standard input.")
    ] = None,
    *,
    place: Place,
    tensor_parallel: TensorParallel = 1,
    timeout: Timeout = 60.0,
    dtypes: Dtypes,
    max_tokens: Annotated[int, typer.Option(help="Per prompt.", min=1)] = 128,
    sampling: Sampling,
    capacity: Annotated[
        int | None, typer.Option(help="Tokens per sequence.", min=1, show_default="what the prompts need")
    ] = None,
    prefill_chunk: Annotated[int, typer.Option(help="Prompt tokens per forward pass.", min=1)] = 512,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the text; repeatable.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Continue prompts with a Llama-family model; prompts that begin alike share their cache.

    Without a prompt, standard input is the prompt.

    Example: kvcache generate --prompt "In the beginning" --max-tokens 64
    """
    with reported(debug):
        prompts = gathered(prompt or (), prompt_file or (), prompt_lines or ())
        if not prompts:
            raise typer.BadParameter("missing prompt: give --prompt TEXT, --prompt-file FILE or a pipe")
        if stop and not all(stop):
            raise RequestError("stop: every text has an empty string in it; name another with --stop")
        settings = sampling.settings(max_tokens, stop)
        config = load_config(place.path)  # a wrong path is told at once: opening a backend may take seconds
        cache = GeneratorOptions(min(len(prompts), MAX_SEQUENCES), capacity, prefill_chunk, dtypes.cache)
        if tensor_parallel > 1:
            _on_ranks(
                place, dtypes, prompts, settings, cache, (tensor_parallel, timeout, as_json, quiet, debug)
            )
            return
        head = {"model": str(place.path), "backend": place.backend, "dtype": dtypes.weights.name}
        screen = screen_for(prompts, as_json, head, quiet)
        with place.open(config) as opened:
            continue_prompts(opened, place.path, dtypes.weights, prompts, settings, cache, screen)


def _on_ranks(
    place: Place,
    dtypes: Dtypes,
    prompts: Sequence[str],
    settings: Settings,
    cache: GeneratorOptions,
    rest: tuple[int, float, bool, bool, bool],
) -> None:
    """``rest``: how many ranks, their timeout, and --json, --quiet, --debug."""
    from kvcache.command.ranks import Job, run

    if place.devices is not None:
        raise ml.DeviceError(f"--devices {place.devices} and --tensor-parallel: one of them splits the model")
    what = (place.path, place.backend, place.device, dtypes.weights, prompts, settings, cache)
    run(Job(*what, *rest), load_config(place.path))


def continue_prompts(
    backend: ml.Backend,
    path: Path,
    dtype: ml.DType,
    prompts: Sequence[str],
    settings: Settings,
    options: GeneratorOptions,
    screen: Screen,
    group: ml.Group | None = None,
) -> None:
    """Generate and show it; with a ``group``, as one of its ranks.

    Everything is checked before the weights are loaded; whatever happens, the screen is put back.
    """
    tokenizer, options = _prepare(backend, path, dtype, prompts, settings, options, group)
    answers: list[Finished] = []
    done = "while loading the model"
    try:
        model = load_model(path, backend, dtype, screen.loading, group)
        with (
            Generator(model, tokenizer, options=options) as generator,
            contextlib.closing(generator.generate(prompts, settings)) as events,
            _abandoned(screen, generator),
        ):
            for event in events:
                screen.event(event)
                done = f"after {generator.statistics.generated_tokens} tokens; the cache is released"
                if isinstance(event, Finished):
                    answers.append(event)
            totals, cache_bytes = generator.statistics, generator.cache_bytes
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted {done}") from None
    finally:
        screen.stop()
    answers.sort(key=lambda answer: answer.request)
    screen.finish(totals, cache_bytes)
    if group is None or group.rank == 0:
        tell_full(answers, generator.limit, model.config.max_positions)


@contextlib.contextmanager
def _abandoned(screen: Screen, generator: Generator) -> Iterator[None]:
    """Whatever ends the block, the answers that there are by then are shown."""
    try:
        yield
    except BrokenPipeError:  # nobody reads them
        raise
    except BaseException:
        screen.stop()
        screen.abandon(generator.statistics, generator.cache_bytes)
        raise


def _prepare(
    backend: ml.Backend,
    path: Path,
    dtype: ml.DType,
    prompts: Sequence[str],
    settings: Settings,
    options: GeneratorOptions,
    group: ml.Group | None,
) -> tuple[Tokenizer, GeneratorOptions]:
    """The tokenizer, and the options with the capacity that the prompts need where none was given."""
    config = load_config(path)
    if group is not None and group.size > 1:
        config = family_of(config).share(config, group).config(config)
    weights = parameter_count(config) * dtype.itemsize
    if options.capacity is not None:  # before the prompts: it needs the config alone
        sizes = (options.cache_dtype, options.max_sequences, options.capacity)
        check_memory(config, backend, *sizes, weights)
    tokenizer = Tokenizer.load(path)
    limit = options.capacity or config.max_positions
    longest = max(len(encode_prompt(tokenizer, text, config, limit)) for text in prompts)
    if options.capacity is None:
        needed = min(config.max_positions, longest + settings.max_new_tokens)
        options = replace(options, capacity=needed)
        check_memory(config, backend, options.cache_dtype, options.max_sequences, needed, weights)
    return tokenizer, options


@contextlib.contextmanager
def reported(debug: bool) -> Iterator[None]:
    """Errors as one line on stderr and exit code 1; Ctrl-C as a short message and 130; warnings as a line."""
    try:
        with _warnings_told(debug):
            yield
    except KeyboardInterrupt as error:
        if debug:
            traceback.print_exc()
        typer.echo(f"kvcache: {str(error) or 'interrupted'}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except (typer.Exit, typer.BadParameter, BrokenPipeError):
        raise
    except Exception as error:
        if debug:
            traceback.print_exc()
        typer.echo(f"kvcache: {_told(error)}", err=True)
        raise typer.Exit(1) from None


@contextlib.contextmanager
def _warnings_told(debug: bool) -> Iterator[None]:
    """What the library logs from warnings on, a line each on stderr; with its trace for ``debug``."""

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            with contextlib.suppress(OSError, ValueError):  # there may be no stderr any more
                typer.echo(f"kvcache: {one_line(record.getMessage())}", err=True)
                if debug and record.exc_info:
                    traceback.print_exception(record.exc_info[1])

    handler, log = Lines(logging.WARNING), logging.getLogger("kvcache")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def _told(error: Exception) -> str:
    text = one_line(error)
    if isinstance(error, OSError) and error.filename is None and error.errno in NO_ROOM:
        return f"the output cannot be written ({error.strerror})"
    if isinstance(error, ml.MLError):
        return text
    if isinstance(error, MemoryError):
        return f"out of memory{f' ({text})' if text else ''}; use a smaller --capacity or a narrower --dtype"
    return f"{type(error).__name__}: {text}; --debug shows where"
