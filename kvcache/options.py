"""The options that several commands of ``kvcache`` share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

import ml

__all__ = [
    "BackendName",
    "CacheDtype",
    "CachePrecision",
    "Debug",
    "Device",
    "Dtype",
    "Json",
    "MaxTokens",
    "ModelPath",
    "Precision",
    "Seed",
    "Temperature",
    "TopK",
    "TopP",
    "device_options",
]


class Precision(StrEnum):
    """The dtypes that weights and activations are held in."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"

    @property
    def dtype(self) -> ml.DType:
        return ml.DType[self.name]


class CachePrecision(StrEnum):
    """The dtypes that keys and values are held in; those in blocks need a head_dim in multiples of 32."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"
    Q4_0 = "q4_0"

    @property
    def dtype(self) -> ml.DType:
        return ml.DType[self.name]


ModelPath = Annotated[
    Path | None,
    typer.Option("--model", help="A Hugging Face folder or .gguf file.", show_default="the bundled model"),
]
BackendName = Annotated[str, typer.Option("--backend", help="See: kvcache backends.", envvar="ML_BACKEND")]
Device = Annotated[str | None, typer.Option(help="As the backend names it: cpu, cuda, mps ...")]
Dtype = Annotated[Precision, typer.Option(help="Of weights and activations.", case_sensitive=False)]
CacheDtype = Annotated[
    CachePrecision | None,
    typer.Option(help="Of keys and values.", case_sensitive=False, show_default="--dtype"),
]
MaxTokens = Annotated[int, typer.Option(help="Tokens of an answer, at most.", min=1)]
Temperature = Annotated[float, typer.Option(help="0 is greedy.", min=0)]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0: all.", min=0)]
TopP = Annotated[float, typer.Option(help="Keep the likeliest up to this probability.", min=0, max=1)]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text.", min=0)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the trace of an error.")]


def device_options(device: str | None) -> dict[str, str]:
    """For ``ml.open_backend``."""
    return {} if device is None else {"device": device}
