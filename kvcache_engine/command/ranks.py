"""``kvcache generate --tensor-parallel N``: starting the ranks, and the work of each rank. A rank is a
separate process that runs ``main``. Under torchrun or mlx.launch started by the user, each rank runs
``kvcache generate --tensor-parallel N`` itself, which then starts no processes.
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
    """The arguments of ``kvcache generate``, pickled for the ranks' processes."""

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
    """Start the ranks and wait for them, or run as a rank if a launcher started this process."""
    family_of(config).check_ranks(config, job.ranks)
    if launched() is not None:
        _work(job, lambda _: 1)
        return
    specs = ml.backend_specs()
    if job.backend not in specs:
        ml.open_backend(job.backend)  # raises
    spec = specs[job.backend]
    if spec.launcher is None:
        raise no_engine(spec.name)
    command = [sys.executable, "-P", "-c", "from kvcache_engine.command.ranks import main; main()"]
    try:
        run_ranks(spec.launcher(job.ranks), command, job.ranks, pickle.dumps(job), job.timeout)
    except RanksError as error:
        gc.freeze()  # shortens the interpreter's exit, which is part of the timeout
        if job.debug:
            for rank, stderr in enumerate(error.told):
                typer.echo("".join(f"[{rank}] {line}\n" for line in stderr.splitlines()), err=True, nl=False)
        raise


def main() -> NoReturn:
    """The entry point of a rank started by ``run``. Its starter handles Ctrl-C, and sends SIGTERM."""
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
    """One rank's work. If it fails because of another rank, the process exits with ``lost(error)``.
    The backend is then not closed, since that might wait forever.
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
    """Join the group and generate with it. Rank 0 shows the output."""
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
    """The requested device; for "cuda", this rank's own device."""
    if job.device not in (None, "cuda") or job.backend not in (specs := ml.backend_specs()):
        return job.device
    rank, size = launched() or (0, 1)
    local = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", size))
    return device_of_rank(specs[job.backend].probe().devices, *local) or job.device
