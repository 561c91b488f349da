"""The model card, README.md, filled in with what this run measured."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .corpus import Corpus
from .model import Llama
from .sample import Request
from .train import Log

__all__ = ["REQUESTS", "Facts", "machine", "write_card"]

REQUESTS = (
    Request(""),
    Request("And the LORD said unto Moses,"),
    Request("", temperature=0.8, seed=1),
    Request("And it came to pass", temperature=0.8, seed=2),
    Request("Blessed is the man", temperature=0.8, seed=3),
    Request("Jesus answered and said unto them,", temperature=0.8, seed=4),
)

CARD = """\
# A tiny Llama that has read the King James Bible

It ships so that the project has a real, trained model to run where nothing can be downloaded. It writes sentences in the
manner of its corpus and knows nothing else.

| | |
|---|---|
| architecture | `LlamaForCausalLM`: {layers} layers, hidden {hidden}, SwiGLU {ffn}, {heads} query heads and {kv_heads} KV heads of {head_dim}, \
RoPE (half-split, theta {theta:g}), RMSNorm, tied embeddings |
| parameters | {parameters:,}, stored as bfloat16 |
| context | {context} tokens |
| tokenizer | byte-level BPE, {vocab} tokens, trained on the training text; `<s>` (BOS, {bytes_per_token:.2f} bytes a token on held-out text) \
comes first, `</s>` ends a chapter |
| held-out loss | **{bpb:.3f} bits per byte** on all {held} held-out chapters; {bpb_shipped:.3f} on `heldout.txt` |
| training loss | {train_bpb:.3f} bits per byte over the last steps |

Both held-out figures are of the bfloat16 weights in this folder, computed in float32. Each chapter is cut into pieces of at
most {span} tokens, each scored after a BOS token and without the piece before it; bits are divided by the chapter's UTF-8 bytes.

## Data and licence

{source}: {chapters} chapters, {bytes:,} bytes, one verse a line, without book names and verse numbers. The text is of 1611 and in
the public domain (in the United Kingdom, printing it is a prerogative of the Crown); Debian's copyright file says that its
copyright has expired. Every 20th chapter ({held} of them, {held_bytes:,} bytes) was held out from the tokenizer and the model;
`heldout.txt` is every fourth of those, with a blank line between chapters. The weights are under the project's licence.

## Training

    {command}

{steps} steps of {batch} windows of {context} tokens ({epochs:.1f} epochs), Muon on the layers' matrices and AdamW on the rest, took
{minutes:.0f} minutes on one thread of {machine}. `training_log.json` holds the figures behind this picture:

![loss](loss.svg)

The seed fixes the weights for one machine and one version of PyTorch; elsewhere the last digits differ.

## Samples

Verbatim, not chosen: the first try of each request, at most {sample_tokens} new tokens, from the bfloat16 weights.

{samples}

## Limits

It has no knowledge, no sense beyond a sentence or two and no safety training; it repeats itself when decoded greedily. It knows only
the English of this one book: other text costs it many bits. The corpus repeats itself (Kings and Chronicles, the Gospels),
so a held-out chapter may have a near double in the training text. Past {context} tokens it is untrained.
"""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the card reports beside the model and the log."""

    corpus: Corpus
    command: str
    batch: int
    epochs: float
    bytes_per_token: float
    train_bpb: float
    bpb: float
    bpb_shipped: float
    samples: Sequence[tuple[Request, str]]


def write_card(path: Path, model: Llama, log: Log, facts: Facts) -> None:
    path.write_text(CARD.format(**about_model(model), **about_run(log, facts)), encoding="utf-8")


def about_model(model: Llama) -> dict[str, object]:
    config = model.config
    return {
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "ffn": config.intermediate_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "theta": config.rope_theta,
        "parameters": model.parameter_count(),
        "context": config.max_position_embeddings,
        "span": config.max_position_embeddings - 1,
        "vocab": config.vocab_size,
    }


def about_run(log: Log, facts: Facts) -> dict[str, object]:
    corpus = facts.corpus
    return {
        "source": corpus.source,
        "chapters": len(corpus.chapters),
        "bytes": utf8_size(corpus.chapters),
        "held": len(corpus.heldout),
        "held_bytes": utf8_size(corpus.heldout),
        "command": facts.command,
        "steps": log.train[-1][0],
        "batch": facts.batch,
        "epochs": facts.epochs,
        "bytes_per_token": facts.bytes_per_token,
        "train_bpb": facts.train_bpb,
        "bpb": facts.bpb,
        "bpb_shipped": facts.bpb_shipped,
        "minutes": log.seconds / 60,
        "machine": machine(),
        "sample_tokens": REQUESTS[0].tokens,
        "samples": "\n\n".join(show(request, text) for request, text in facts.samples),
    }


def show(request: Request, text: str) -> str:
    how = f"temperature {request.temperature}, seed {request.seed}" if request.temperature else "greedy"
    prompt = f"prompt `{request.prompt}`" if request.prompt else "no prompt"
    return f"{prompt}, {how}:\n\n" + "\n".join(f"> {line}  " for line in text.splitlines())


def utf8_size(texts: Sequence[str]) -> int:
    return sum(len(text.encode()) for text in texts)


def machine() -> str:
    """The processor and the version of PyTorch, in words."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} with PyTorch {torch.__version__}"
