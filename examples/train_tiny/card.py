"""The model card with its figures, and the held-out text, which are written beside the weights."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from .model import Llama
from .text import BOS, EOS, Corpus, encode_chapters

CARD = """\
# A tiny Llama

It ships so that the project has a real, trained model to run where nothing can be downloaded. It writes
sentences in the manner of its corpus and knows nothing else.

| | |
|---|---|
| corpus | {source} |
| architecture | `LlamaForCausalLM`: {num_hidden_layers} layers of width {hidden_size}, \
SwiGLU of {intermediate_size}, \
{num_attention_heads} query heads and {num_key_value_heads} KV heads of {head_dim}, \
RoPE (half-split, theta {rope_theta:g}), RMSNorm, tied embeddings |
| parameters | {parameters:,}, stored as bfloat16 |
| context | {max_position_embeddings} tokens |
| tokenizer | byte-level BPE, {vocab_size} tokens, {bytes_per_token:.2f} bytes a token on held-out text; \
`<s>` (id 1) comes first, `</s>` (id 2) ends a chapter |
| held-out loss | **{bpb:.3f} bits per byte** on all {held} held-out chapters; \
{bpb_shipped:.3f} on `heldout.txt` |
| training loss | {train_bpb:.3f} bits per byte, mean of the last steps |

Both held-out figures are of the bfloat16 weights in this folder, computed in float32. Each chapter is cut
into pieces of at most {span} tokens; each piece is scored after a BOS token and without what came before it;
the sum is divided by the UTF-8 bytes of the chapters.

## Data and licence

{source}: {chapters} chapters, {bytes:,} bytes, one verse a line.
{licence}

Every {stride}th chapter ({held} of them, {held_bytes:,} bytes) was kept from the tokenizer and the model.
`heldout.txt` is {shipped} of those, with a blank line between chapters.
The weights are under the project's own licence.

## Training

    {command}

{steps} steps of {batch} windows of {max_position_embeddings} tokens ({epochs:.1f} epochs)
took {minutes:.0f} minutes on one thread of {machine}, with Muon on the matrices of the layers
and AdamW on the rest (`training_log.json`):

| step | training, nats per token | heldout.txt, bits per byte |
|---|---|---|
{curve}

`heldout.txt` was scored at every checkpoint (lowest: {best:.3f}, at step {best_step}; the weights are
those of the last step all the same). Its score also guided the choice of optimizer, learning rates and
shape, in a few short runs; the other held-out chapters had no part in that.

The seed fixes the weights for one machine and one version of PyTorch; elsewhere the last digits differ.

## Samples

Verbatim and not chosen: one try for each request, at most {sample_tokens} new tokens, bfloat16 weights.

{samples}

## Limits

It has no knowledge, little sense beyond a sentence or two and no safety training, and it repeats itself when
decoded greedily. It has seen nothing but its corpus: any other text costs it many more bits. Where the corpus
repeats itself (Kings and Chronicles, the Gospels), a held-out chapter has a near double in the training text.
Beyond {max_position_embeddings} tokens it is untrained.
"""


REQUESTS = (
    ("", 0.0, 0),
    ("And the LORD said unto Moses,", 0.0, 0),
    ("", 0.8, 1),
    ("And it came to pass", 0.8, 2),
    ("Blessed is the man", 0.8, 3),
    ("Jesus answered and said unto them,", 0.8, 4),
)
"""(prompt, temperature, seed) of the samples; a temperature of 0 is greedy."""
SAMPLE_TOKENS = 120


@dataclass(slots=True)
class Log:
    """How a run was started and how it went.

    ``points``: (step, nats per token of the steps since the point before, bits per byte of heldout.txt).
    """

    command: str
    machine: str
    seed: int
    batch: int
    seconds: float = 0.0
    points: list[tuple[int, float, float]] = field(default_factory=list)


def write_report(out: Path, model: Llama, tokenizer: Tokenizer, corpus: Corpus, log: Log) -> None:
    """heldout.txt, README.md and training_log.json; ``model`` has the weights as they lie in ``out``."""
    config = model.config
    train_tokens, held_tokens = (_count(tokenizer, text) for text in (corpus.train, corpus.heldout))
    to_bpb = train_tokens / _size(corpus.train) / math.log(2)
    bpb, bpb_shipped = (bits_per_byte(model, tokenizer, text) for text in (corpus.heldout, corpus.shipped))
    best, best_step = min((bits, step) for step, _, bits in log.points)
    steps = log.points[-1][0]
    shown = log.points[:: max(1, len(log.points) // 8)]
    curve = (f"| {step} | {nats:.3f} | {bits:.3f} |" for step, nats, bits in shown)
    card = CARD.format(
        **asdict(config),
        source=corpus.source,
        licence=corpus.licence,
        chapters=len(corpus.chapters),
        bytes=_size(corpus.chapters),
        stride=corpus.stride,
        held=len(corpus.heldout),
        held_bytes=_size(corpus.heldout),
        shipped=len(corpus.shipped),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        span=config.max_position_embeddings - 1,
        bytes_per_token=sum(map(len, corpus.heldout)) / held_tokens,
        bpb=bpb,
        bpb_shipped=bpb_shipped,
        train_bpb=log.points[-1][1] * to_bpb,
        command=log.command,
        steps=steps,
        batch=log.batch,
        epochs=steps * log.batch * config.max_position_embeddings / train_tokens,
        minutes=log.seconds / 60,
        machine=log.machine,
        best=best,
        best_step=best_step,
        curve="\n".join(curve),
        sample_tokens=SAMPLE_TOKENS,
        samples="\n\n".join(_sample(model, tokenizer, *request) for request in REQUESTS),
    )
    (out / "README.md").write_text(card, encoding="utf-8")
    (out / "heldout.txt").write_text("\n\n".join(corpus.shipped) + "\n", encoding="utf-8")
    digest = hashlib.sha256("\n\n".join(corpus.chapters).encode()).hexdigest()
    results = {"text_sha256": digest, "heldout_bits_per_byte": bpb, "heldout_txt_bits_per_byte": bpb_shipped}
    write_log(out, {**results, **asdict(log)})


def write_log(out: Path, record: dict[str, object]) -> None:
    """JSON, a field a line."""
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in record.items())
    (out / "training_log.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def _size(texts: Sequence[str]) -> int:
    return sum(len(text.encode()) for text in texts)


def _count(tokenizer: Tokenizer, chapters: Sequence[str]) -> int:
    return sum(len(ids) for ids in encode_chapters(tokenizer, chapters))


@torch.no_grad()
def bits_per_byte(model: Llama, tokenizer: Tokenizer, chapters: Sequence[str]) -> float:
    """Cut each chapter into windows of BOS and at most 511 tokens, sum their bits, divide by UTF-8 bytes.

    BOS is not scored. Nothing is carried from one window to the next, so this is an upper bound.
    """
    nats = 0.0
    for ids in encode_chapters(tokenizer, chapters):
        for targets in torch.split(torch.from_numpy(ids), model.config.max_position_embeddings - 1):
            logits = model(torch.cat([torch.tensor([BOS]), targets[:-1]])[None])[0]
            nats += F.cross_entropy(logits.float(), targets, reduction="sum").item()
    return nats / math.log(2) / _size(chapters)


@torch.no_grad()
def _sample(model: Llama, tokenizer: Tokenizer, prompt: str, temperature: float, seed: int) -> str:
    """How it was asked for, then the text up to the end of the chapter, each line of it as a quotation."""
    random = torch.Generator().manual_seed(seed)
    ids: list[int] = tokenizer.encode(prompt).ids
    for _ in range(SAMPLE_TOKENS):
        logits = model(torch.tensor([ids[-model.config.max_position_embeddings :]]))[0, -1]
        if temperature:
            token = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=random))
        else:
            token = int(logits.argmax())
        if token == EOS:
            break
        ids.append(token)
    how = f"temperature {temperature}, seed {seed}" if temperature else "greedy"
    asked = f"Prompt `{prompt}`" if prompt else "No prompt"
    return f"{asked}, {how}:\n\n" + "  \n".join(f"> {line}" for line in tokenizer.decode(ids).split("\n"))
