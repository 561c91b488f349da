"""``kvcache generate --tensor-parallel N``: starting the ranks, and what each of them does.

A rank is a process of its own that runs ``main``. Under torchrun or mlx.launch that a user has started, each
rank runs ``kvcache generate --tensor-parallel N`` itself, which then starts none.
"""

from __future__ import annotations

import gc
import os
import pickle
import secrets
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import typer

import ml
from kvcache_engine.command.generation import continue_prompts
from kvcache_engine.command.options import device_options
from kvcache_engine.command.reporting import one_line, reported
from kvcache_engine.command.screen import Screen, screen_for
from kvcache_engine.config import ModelConfig
from kvcache_engine.models.families import family_of
from kvcache_engine.options import EngineOptions
from kvcache_engine.parallel import device_of_rank, join, no_engine, of_all
from kvcache_engine.rank import UNREAD, Limits, RanksError, exit_code, job_of_rank, leave
from kvcache_engine.ranks import run_ranks
from kvcache_engine.requests import GenerationOptions
from ml.distributed import launched

__all__ = ["Job", "main", "run"]


@dataclass(frozen=True, slots=True)
class Job:
    """What ``kvcache generate`` was asked for; pickled, so that other processes of ours can do it."""

    model: Path
    backend: str
    device: str | None
    dtype: ml.DType
    prompts: Sequence[str]
    settings: GenerationOptions
    options: EngineOptions
    ranks: int
    timeout: float
    as_json: bool = False
    quiet: bool = False
    debug: bool = False


def run(job: Job, config: ModelConfig) -> None:
    """Start the ranks and wait for them; or be one, where a launcher has started this process as that."""
    family_of(config).check_ranks(config, job.ranks)
    if launched() is not None:
        _work(job, lambda _: 1)
        return
    registry = ml.plugins.registry()
    spec = registry.specs().get(job.backend) or registry.usable(job.backend)  # unknown: told what there is
    if spec.launcher is None:
        raise no_engine(spec.name)
    command = [sys.executable, "-P", "-c", "from kvcache_engine.command.ranks import main; main()"]
    try:
        run_ranks(spec.launcher(job.ranks), command, job.ranks, pickle.dumps(job), job.timeout)
    except RanksError as error:
        gc.freeze()  # the interpreter's end looks at no object then: it is part of the timeout
        if job.debug:
            for rank, told in enumerate(error.told):
                typer.echo("".join(f"[{rank}] {line}\n" for line in told.splitlines()), err=True, nl=False)
        raise


def main() -> NoReturn:
    """A rank that ``run`` has started. Ctrl-C is for the process that did, which asks us by SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    code = 0
    try:
        job = pickle.loads(job_of_rank())
        with reported(job.debug):
            _work(job, exit_code)
    except typer.Exit as ended:
        code = ended.exit_code
    except ml.MLError as error:
        typer.echo(f"kvcache: {error}", err=True)
        code = 1
    except BrokenPipeError:
        code = UNREAD
    leave(code)


def _work(job: Job, lost: Callable[[ml.GroupError], int]) -> None:
    """One rank's part. Where it fails for want of another, the process ends with ``lost`` of the error.

    The backend is not closed then: what it still waits for might never come.
    """
    with ml.open_backend(job.backend, **device_options(_device(job))) as backend:
        try:
            _as_rank(job, backend)
        except ml.GroupError as error:
            if job.debug:
                traceback.print_exc()
            typer.echo(f"kvcache: {one_line(error)}", err=True)
            leave(lost(error))


def _as_rank(job: Job, backend: ml.Backend) -> None:
    """Join the others and generate with them. Rank 0 shows what comes."""
    group = join(backend, job.ranks, Limits(job.timeout).waiting)
    settings = job.settings
    if settings.temperature > 0 and settings.seed is None:
        with backend.new_context() as ctx:
            settings = replace(settings, seed=of_all(ctx, group, secrets.randbits(32))[0])
    head = {"model": str(job.model), "backend": job.backend, "dtype": job.dtype.name, "ranks": job.ranks}
    screen = Screen() if group.rank else screen_for(job.prompts, job.as_json, head, job.quiet)
    continue_prompts(backend, job.model, job.dtype, job.prompts, settings, job.options, screen, group=group)
    group.barrier()


def _device(job: Job) -> str | None:
    """What was asked for; where that is any CUDA device, this rank's own."""
    if job.device not in (None, "cuda") or job.backend not in (specs := ml.plugins.registry().specs()):
        return job.device
    rank, size = launched() or (0, 1)
    local = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", size))
    return device_of_rank(specs[job.backend].probe().devices, *local) or job.device
