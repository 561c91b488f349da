"""The options that several commands of ``kvcache`` share; related ones form a group (grouped.py)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

import ml
from kvcache import format_names, open_format
from kvcache.cache import CacheDType
from kvcache_engine.checkpoints.source import existing_model_path
from kvcache_engine.command.completing import backend_names, cache_types
from kvcache_engine.config import ModelConfig
from kvcache_engine.device_map import open_on_devices, parse_devices
from kvcache_engine.errors import RequestError
from kvcache_engine.language_model import LanguageModel
from kvcache_engine.loading import bundled_model, load_config, load_model
from kvcache_engine.requests import GenerationOptions
from kvcache_engine.runtimes import Runtime, load_foreign, runtime_for, sampling_defaults

__all__ = [
    "BackendName",
    "BatchInvariant",
    "Debug",
    "Device",
    "Dtypes",
    "Json",
    "MaxTokens",
    "ModelPath",
    "Place",
    "Quiet",
    "RuntimeName",
    "Sampling",
    "TensorParallel",
    "Timeout",
    "device_options",
    "finite",
    "named_store",
]


class Precision(StrEnum):
    """The dtypes of weights and activations."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"

    @property
    def dtype(self) -> ml.DType:
        return ml.DType[self.name]


ModelPath = Annotated[
    Path | None,
    typer.Option(
        "--model",
        help="A Hugging Face folder or .gguf file, or OWNER/NAME on the Hub.",
        show_default="the bundled model",
    ),
]
BackendName = Annotated[
    str,
    typer.Option(
        "--backend",
        help="The backend; kvcache backends lists them.",
        envvar="ML_BACKEND",
        autocompletion=backend_names,
    ),
]
Device = Annotated[str | None, typer.Option(help="A device name of the backend: cpu, cuda, mps ...")]
RuntimeName = Annotated[
    Runtime | None,
    typer.Option(
        "--runtime",
        help="The code that runs the model: our own (any backend), transformers (torch) or mlx-lm (mlx).",
        show_default="own if it supports the model, else what is installed",
    ),
]
TensorParallel = Annotated[
    int, typer.Option(help="Split the model over this many processes (torch, mlx).", min=1)
]
Timeout = Annotated[
    float,
    typer.Option(
        help="Seconds until the command ends if a process of --tensor-parallel stops responding.", min=0.1
    ),
]


def _stored(value: str | None) -> str | None:
    """The library's name of a format."""
    try:
        return None if value is None else open_format(value).name
    except ml.DTypeError:
        known = ", ".join(name.lower() for name in format_names())
        raise typer.BadParameter(f"Input should be one of {known}") from None


def _format_option(what: str, default: str) -> Any:
    return typer.Option(
        help=what, metavar="FORMAT", callback=_stored, autocompletion=cache_types, show_default=default
    )


MaxTokens = Annotated[int, typer.Option(help="Maximum number of tokens to generate.", min=1)]


def finite(value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter("Input should be a finite number")
    return value


def _share(value: float | None) -> float | None:
    if value is not None and not 0 < value <= 1:
        raise typer.BadParameter("Input should be above 0 and at most 1 (1 keeps all tokens)")
    return value


BatchInvariant = Annotated[
    bool,
    typer.Option(
        "--batch-invariant",
        help="Give answers that do not depend on the cache or other requests, bit for bit; slower.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print only the result: no progress bars, no summary.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def device_options(device: str | None) -> dict[str, str]:
    """The options for ``ml.open_backend``."""
    return {} if device is None else {"device": device}


def named_store(store: str, hint: str = "") -> str | Path:
    """--store as an argument of ``open_store``, which does not accept a folder; ``hint`` is for a file."""
    if "://" in store or store.startswith("file:"):
        return store
    path = Path(store).expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise RequestError(f"--store {store}: is a file; --store must be a folder{hint}")
    return path


@dataclass(frozen=True, slots=True)
class Place:
    """The model, its runtime, and its backend and devices."""

    model: ModelPath = None
    backend: BackendName = "numpy"
    device: Device = None
    devices: Annotated[
        str | None, typer.Option(help="Split the layers over these devices, in order: cuda:0,cuda:1 ...")
    ] = None
    runtime: RuntimeName = None

    @property
    def path(self) -> Path:
        return bundled_model() if self.model is None else existing_model_path(self.model)

    def open(self, config: ModelConfig) -> ml.Backend:
        """The backend, for a model of this config."""
        if self.devices is None:
            return ml.open_backend(self.backend, **device_options(self.device))
        if self.device is not None:
            raise ml.DeviceError(
                f"--device {self.device} and --devices {self.devices} cannot be combined; use one of them"
            )
        return open_on_devices(self.backend, parse_devices(self.devices), config)

    @property
    def chosen(self) -> Runtime:
        """The chosen runtime. Raises NotSupportedError, and RequestError for options that need our own
        models.
        """
        chosen_runtime = runtime_for(self.path, self.runtime)
        if chosen_runtime is Runtime.OWN:
            return chosen_runtime
        if self.backend not in ("numpy", chosen_runtime.backend):
            raise RequestError(
                f"--backend {self.backend}: {chosen_runtime.value} runs on "
                f"{chosen_runtime.backend}; omit --backend and unset ML_BACKEND, or choose a model that "
                "--runtime own supports"
            )
        if self.devices is not None:
            raise RequestError(
                f"--devices {self.devices} requires --runtime own; this model runs in {chosen_runtime.value}"
            )
        return chosen_runtime

    @property
    def backend_name(self) -> str:
        """The backend that the model runs on."""
        return self.chosen.backend or self.backend

    @contextlib.contextmanager
    def loaded(
        self, dtype: ml.DType, progress: Callable[[int, int], None] | None = None, mtp: bool = False
    ) -> Iterator[LanguageModel]:
        """The model on its backend, which is closed at the end; see ``load_model``."""
        runtime, path = self.chosen, self.path
        if runtime is Runtime.OWN:
            with self.open(load_config(path)) as backend:
                yield load_model(path, backend, dtype, progress, mtp=mtp)
            return
        if mtp:
            raise RequestError(f"--draft mtp requires --runtime own; this model runs in {runtime.value}")
        with ml.open_backend(runtime.backend, **device_options(self.device)) as backend:
            yield load_foreign(runtime, path, backend, dtype)


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The dtypes of weights, and of keys and values."""

    dtype: Annotated[
        Precision, typer.Option(help="The dtype of weights and activations.", case_sensitive=False)
    ] = Precision.F32
    cache_dtype: Annotated[
        str | None,
        _format_option(
            "The storage format of keys and values: f16, q8_0, q4_0, f8_e4m3, affine4_64 ...", "--dtype"
        ),
    ] = None
    cache_type_k: Annotated[str | None, _format_option("The storage format of keys.", "--cache-dtype")] = None
    cache_type_v: Annotated[str | None, _format_option("The storage format of values.", "--cache-dtype")] = (
        None
    )

    @property
    def weights(self) -> ml.DType:
        return self.dtype.dtype

    @property
    def cache(self) -> CacheDType:
        """The format for ``Cache.init``."""
        both = self.cache_dtype or self.weights.name
        return self.cache_type_k or both, self.cache_type_v or both


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling options."""

    temperature: Annotated[
        float | None,
        typer.Option(
            help="Sampling temperature; 0 is greedy.",
            min=0,
            callback=finite,
            show_default="generation_config.json, else 0",
        ),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(
            help="Keep the k most likely tokens; 0: all.",
            min=0,
            show_default="generation_config.json, else 0",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Keep the most likely tokens up to this total probability; 1: all.",
            callback=_share,
            show_default="generation_config.json, else 1",
        ),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Keep tokens with at least this fraction of the highest probability; 0: all.",
            min=0,
            max=1,
            show_default="generation_config.json, else 0",
        ),
    ] = None
    seed: Annotated[
        int | None, typer.Option(help="Random seed: the same seed gives the same text.", min=0)
    ] = None

    def settings(self, max_tokens: int, path: Path, stop: Sequence[str] | None = None) -> GenerationOptions:
        """The requested settings, completed by the defaults of the model at ``path``."""
        names = ("temperature", "top_k", "top_p", "min_p")
        requested = {name: value for name in names if (value := getattr(self, name)) is not None}
        drawn = {**sampling_defaults(path), **requested}
        return GenerationOptions(max_tokens, seed=self.seed, stop=tuple(stop or ()), **drawn)
