"""The commands of ``kvcache``: their options, and the functions that they call."""

from __future__ import annotations

import sys
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import ml
from kvcache_engine.command.backends import listing, plain, record, survey
from kvcache_engine.command.chat import chat
from kvcache_engine.command.completing import mend_zsh
from kvcache_engine.command.conformance import conformance
from kvcache_engine.command.drafting import Drafting
from kvcache_engine.command.generation import continue_prompts
from kvcache_engine.command.grouped import ungrouped
from kvcache_engine.command.inspection import inspect
from kvcache_engine.command.json_output import print_json
from kvcache_engine.command.options import (
    BackendName,
    BatchInvariant,
    Debug,
    Device,
    Dtypes,
    Json,
    Place,
    Quiet,
    Sampling,
    TensorParallel,
    Timeout,
    device_options,
)
from kvcache_engine.command.progress import draws
from kvcache_engine.command.prompts import gathered
from kvcache_engine.command.reporting import reported
from kvcache_engine.command.saved import load, save
from kvcache_engine.command.screen import screen_for
from kvcache_engine.command.serve import serve
from kvcache_engine.command.usage import CommandGroup
from kvcache_engine.errors import RequestError
from kvcache_engine.loading import load_config
from kvcache_engine.options import EngineOptions
from kvcache_engine.runtimes import Runtime

__all__ = ["app"]

MAX_SEQUENCES = 16
"""Prompts that run at the same time; further ones wait for a free sequence."""

LISTING_WIDTH = 60
"""The columns that the listing of backends needs; on narrower terminals, lines are not formatted."""

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

    Each one that can run is opened briefly to query its memory and capabilities.

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
@ungrouped
def bench(
    backend: BackendName = "numpy",
    device: Device = None,
    *,
    dtypes: Dtypes,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer lengths and rounds.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure put and get on this machine, compared with hand-written code and other installed caches.

    Example: kvcache bench --backend torch --quick
    """
    with reported(debug):
        from kvcache.testing.bench import measure, shown

        with ml.open_backend(backend, **device_options(device)) as opened:
            rows = measure(opened, dtypes.weights, quick, stored=dtypes.cache)
            if as_json:
                print_json([row.as_dict() for row in rows])
            else:
                for row in rows:
                    typer.echo(shown(row))


@app.command()
@ungrouped
def generate(
    prompt: Annotated[
        list[str] | None, typer.Option(help="A text to continue; repeat for a batch. -: standard input.")
    ] = None,
    prompt_file: Annotated[
        list[Path] | None, typer.Option(help="A file with one prompt; repeatable. -: standard input.")
    ] = None,
    prompt_lines: Annotated[
        list[Path] | None, typer.Option(help="A file with one prompt per line. -: standard input.")
    ] = None,
    *,
    place: Place,
    tensor_parallel: TensorParallel = 1,
    timeout: Timeout = 60.0,
    dtypes: Dtypes,
    max_tokens: Annotated[
        int, typer.Option(help="Maximum number of tokens to generate per prompt.", min=1)
    ] = 128,
    sampling: Sampling,
    drafting: Drafting,
    capacity: Annotated[
        int | None, typer.Option(help="Tokens per sequence.", min=1, show_default="what the prompts need")
    ] = None,
    prefill_chunk: Annotated[int, typer.Option(help="Prompt tokens per forward pass.", min=1)] = 512,
    batch_invariant: BatchInvariant = False,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the text; repeatable.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Continue prompts with a model; common prefixes are computed once.

    Without a prompt, standard input is the prompt.

    Example: kvcache generate --prompt "In the beginning" --max-tokens 64
    """
    with reported(debug):
        prompts = gathered(prompt or (), prompt_file or (), prompt_lines or ())
        if not prompts:
            raise typer.BadParameter("missing prompt: give --prompt TEXT, --prompt-file FILE or a pipe")
        if stop and not all(stop):
            raise RequestError("stop: --stop must not be empty")
        settings = sampling.settings(max_tokens, place.path, stop)
        runtime = place.chosen
        if runtime is Runtime.OWN:
            load_config(place.path)  # report a wrong path at once: opening a backend may take seconds
        cache = EngineOptions(
            min(len(prompts), MAX_SEQUENCES), capacity, prefill_chunk, dtypes.cache,
            batch_invariant=batch_invariant,
        )  # fmt: skip
        cache = drafting.options(cache)
        if tensor_parallel > 1:
            if drafting.draft is not None:
                raise RequestError(f"--draft {drafting.draft} and --tensor-parallel cannot be combined")
            from kvcache_engine.command.ranks import Job, run

            if runtime is not Runtime.OWN:
                raise RequestError(
                    f"--tensor-parallel requires --runtime own; this model runs in {runtime.value}"
                )
            if place.devices is not None:
                raise ml.DeviceError(
                    f"--devices {place.devices} and --tensor-parallel cannot be combined; each splits the "
                    "model in its own way"
                )
            what = (place.path, place.backend, place.device, dtypes.weights, prompts, settings, cache)
            run(Job(*what, tensor_parallel, timeout, as_json, quiet, debug), load_config(place.path))
            return
        head = {"model": str(place.path), "backend": place.backend_name, "dtype": dtypes.weights.name}
        screen = screen_for(prompts, as_json, head, quiet)
        if runtime is Runtime.OWN:
            with place.open(load_config(place.path)) as opened:
                shared = (place.path, dtypes.weights, prompts, settings, cache, screen, drafting)
                continue_prompts(opened, *shared)
        else:
            with place.loaded(dtypes.weights, mtp=drafting.mtp) as model:
                shared = (place.path, dtypes.weights, prompts, settings, cache, screen, drafting)
                continue_prompts(model.backend, *shared, model=model)


for _command in (chat, conformance, inspect, load, save, serve):
    app.command()(_command)
