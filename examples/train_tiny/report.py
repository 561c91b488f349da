"""Judges the rounded weights as they lie on disk, and writes all that is not needed to run the model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from .card import CARD, about_corpus, about_log, about_model, show
from .corpus import Corpus
from .evaluate import bits_per_byte
from .export import load_model, load_tokenizer
from .figure import draw_loss
from .log import Log
from .sample import Request, generate
from .windows import encode_chapters

__all__ = ["write_report"]

REQUESTS = (
    Request(""),
    Request("And the LORD said unto Moses,"),
    Request("", temperature=0.8, seed=1),
    Request("And it came to pass", temperature=0.8, seed=2),
    Request("Blessed is the man", temperature=0.8, seed=3),
    Request("Jesus answered and said unto them,", temperature=0.8, seed=4),
)


def write_report(out: Path, corpus: Corpus, log: Log) -> None:
    """heldout.txt, loss.svg, README.md and training_log.json, from the model in `out`."""
    tokenizer, model = load_tokenizer(out), load_model(out)
    train_tokens = token_count(tokenizer, corpus.train)
    to_bpb = train_tokens / sum(map(len, map(str.encode, corpus.train))) / math.log(2)
    bpb, bpb_shipped = (bits_per_byte(model, tokenizer, text) for text in (corpus.heldout, corpus.shipped))
    measured = {
        "epochs": log.steps * log.batch * model.config.max_position_embeddings / train_tokens,
        "bytes_per_token": sum(map(len, corpus.heldout)) / token_count(tokenizer, corpus.heldout),
        "train_bpb": log.final_loss() * to_bpb,
        "bpb": bpb,
        "bpb_shipped": bpb_shipped,
        "sample_tokens": REQUESTS[0].tokens,
        "samples": "\n\n".join(show(request, generate(model, tokenizer, request)) for request in REQUESTS),
    }
    card = CARD.format(**measured, **about_model(model), **about_corpus(corpus), **about_log(log))
    (out / "README.md").write_text(card, encoding="utf-8")
    (out / "heldout.txt").write_text("\n\n".join(corpus.shipped) + "\n", encoding="utf-8")
    draw_loss(out / "loss.svg", log, to_bpb, f"{model.parameter_count():,} parameters, {corpus.source}")
    results = {"heldout_bits_per_byte": round(bpb, 4), "heldout_txt_bits_per_byte": round(bpb_shipped, 4)}
    log.write(out / "training_log.json", text_sha256=text_hash(corpus), **results)
    print(f"held out {bpb:.4f} bits per byte, heldout.txt {bpb_shipped:.4f}; wrote {out}", flush=True)


def text_hash(corpus: Corpus) -> str:
    return hashlib.sha256("\n\n".join(corpus.chapters).encode()).hexdigest()


def token_count(tokenizer: Tokenizer, chapters: Sequence[str]) -> int:
    return sum(len(ids) for ids in encode_chapters(tokenizer, chapters))
