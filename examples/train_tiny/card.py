"""The model card, README.md, filled in with what the run measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter

from .corpus import Corpus
from .log import Log
from .model import Llama
from .sample import Request

__all__ = ["CARD", "about_corpus", "about_log", "about_model", "show"]

CARD = """\
# A tiny Llama

It ships so that the project has a real, trained model to run where nothing can be downloaded. It writes
sentences in the manner of its corpus and knows nothing else.

| | |
|---|---|
| corpus | {source} |
| architecture | `LlamaForCausalLM`: {layers} layers of width {hidden}, SwiGLU of {ffn}, \
{heads} query heads and {kv_heads} KV heads of {head_dim}, \
RoPE (half-split, theta {theta:g}), RMSNorm, tied embeddings |
| parameters | {parameters:,}, stored as bfloat16 |
| context | {context} tokens |
| tokenizer | byte-level BPE, {vocab} tokens, {bytes_per_token:.2f} bytes a token on held-out text; \
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

{steps} steps of {batch} windows of {context} tokens ({epochs:.1f} epochs) took {minutes:.0f} minutes
on one thread of {machine}, with Muon on the matrices of the layers
and AdamW on the rest. `training_log.json` holds the figures behind this picture:

![loss](loss.svg)

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
Beyond {context} tokens it is untrained.
"""


def about_model(model: Llama) -> Mapping[str, object]:
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


def about_corpus(corpus: Corpus) -> Mapping[str, object]:
    return {
        "source": corpus.source,
        "licence": corpus.licence,
        "chapters": len(corpus.chapters),
        "bytes": utf8_size(corpus.chapters),
        "stride": corpus.stride,
        "held": len(corpus.heldout),
        "held_bytes": utf8_size(corpus.heldout),
        "shipped": len(corpus.shipped),
    }


def about_log(log: Log) -> Mapping[str, object]:
    best_step, best = min(log.heldout, key=itemgetter(1))
    return {
        "best": best,
        "best_step": best_step,
        "command": log.command,
        "steps": log.steps,
        "batch": log.batch,
        "minutes": log.seconds / 60,
        "machine": log.machine,
    }


def show(request: Request, text: str) -> str:
    """One sample: how it was asked for, then each line of it as a quotation."""
    how = f"temperature {request.temperature}, seed {request.seed}" if request.temperature else "greedy"
    prompt = f"Prompt `{request.prompt}`" if request.prompt else "No prompt"
    return f"{prompt}, {how}:\n\n" + "  \n".join(f"> {line}" for line in text.split("\n"))


def utf8_size(texts: Sequence[str]) -> int:
    return sum(len(text.encode()) for text in texts)
