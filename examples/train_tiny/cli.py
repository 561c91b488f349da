"""The command line: text in, a Hugging Face folder with its model card out."""

from __future__ import annotations

import argparse
import hashlib
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from tokenizers import Tokenizer

from .card import REQUESTS, Facts, machine, write_card
from .corpus import Corpus, read_bible, read_text
from .errors import TrainTinyError
from .evaluate import bits_per_byte
from .export import load_model, save_model, write_json
from .figure import draw_loss
from .model import Llama, LlamaConfig
from .sample import generate
from .tokenizer import train_tokenizer
from .train import Log, Plan, train
from .windows import Windows, encode_chapters

__all__ = ["main"]

STEPS = 2200
REPOSITORY = Path(__file__).resolve().parents[2]
NEWLINE = "Ċ"  # how a byte-level tokenizer spells "\n"


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        run(args)
    except TrainTinyError as e:
        print(f"train_tiny: {e}", file=sys.stderr)
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="train_tiny", description="Train the bundled Llama on the King James Bible.")
    out.add_argument("--out", type=Path, default=REPOSITORY / "kvcache" / "runner" / "tiny", help="folder to write")
    out.add_argument("--text", type=Path, help="train on this file instead: a verse a line, blank lines part chapters")
    out.add_argument("--steps", type=positive, default=STEPS, help="optimizer steps (default %(default)s)")
    out.add_argument("--batch", type=positive, default=8, help="windows of 512 tokens a step (default %(default)s)")
    out.add_argument("--seed", type=int, default=0)
    out.add_argument("--threads", type=positive, default=1, help="CPU threads; other than 1 changes the last digits")
    return out


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    corpus = read_text(args.text) if args.text else read_bible()
    tokenizer = train_tokenizer(corpus.train, LlamaConfig().vocab_size)
    chapters = encode_chapters(tokenizer, corpus.train)
    model = Llama(LlamaConfig(vocab_size=tokenizer.get_vocab_size()))
    windows = Windows(chapters, tokenizer.token_to_id(NEWLINE), model.config.max_position_embeddings, args.seed)
    print(f"{model.parameter_count():,} parameters, {len(windows.stream):,} training tokens, writing {args.out}", flush=True)

    def checkpoint(step: int, log: Log) -> None:
        log.heldout.append((step, round(bits_per_byte(model, tokenizer, corpus.shipped), 4)))
        save_model(args.out, model, tokenizer)
        print(f"step {step}  held out {log.heldout[-1][1]:.4f} bits per byte  saved", flush=True)

    plan = Plan(args.steps, args.batch, log_every=10, checkpoint_every=100)
    log = train(model, windows, plan, checkpoint)
    report(args, corpus, tokenizer, load_model(args.out, model.config), log)


def report(args: argparse.Namespace, corpus: Corpus, tokenizer: Tokenizer, model: Llama, log: Log) -> None:
    """Judge the rounded weights as they lie on disk, and write the card, the picture, the log and the held-out text."""
    out: Path = args.out
    to_bpb = 1 / math.log(2) / bytes_per_token(tokenizer, corpus.train)
    facts = Facts(
        corpus=corpus,
        command=command_line(args),
        batch=args.batch,
        epochs=args.steps * args.batch * model.config.max_position_embeddings / token_count(tokenizer, corpus.train),
        bytes_per_token=bytes_per_token(tokenizer, corpus.heldout),
        train_bpb=log.train[-1][1] * to_bpb,
        bpb=bits_per_byte(model, tokenizer, corpus.heldout),
        bpb_shipped=bits_per_byte(model, tokenizer, corpus.shipped),
        samples=[(request, generate(model, tokenizer, request)) for request in REQUESTS],
    )
    (out / "heldout.txt").write_text("\n\n".join(corpus.shipped) + "\n", encoding="utf-8")
    draw_loss(out / "loss.svg", log, to_bpb, f"{model.parameter_count():,} parameters, {corpus.source}")
    write_card(out / "README.md", model, log, facts)
    write_json(out / "training_log.json", summary(args, facts, log))
    print(f"held out {facts.bpb:.4f} bits per byte, heldout.txt {facts.bpb_shipped:.4f}; wrote {out}", flush=True)


def summary(args: argparse.Namespace, facts: Facts, log: Log) -> dict[str, object]:
    text = "\n\n".join(facts.corpus.chapters)
    return {
        "command": facts.command,
        "seed": args.seed,
        "machine": machine(),
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "heldout_bits_per_byte": round(facts.bpb, 4),
        "heldout_txt_bits_per_byte": round(facts.bpb_shipped, 4),
        **asdict(log),
    }


def command_line(args: argparse.Namespace) -> str:
    """The command that repeats this run."""
    given = [f"--text={args.text}"] if args.text else []
    changed = {name: getattr(args, name) for name in ("steps", "batch", "seed", "threads")}
    given += [f"--{name}={value}" for name, value in changed.items() if value != parser().get_default(name)]
    return shlex.join(["python", "examples/train_tiny", *given])


def token_count(tokenizer: Tokenizer, chapters: Sequence[str]) -> int:
    return sum(len(ids) for ids in encode_chapters(tokenizer, chapters))


def bytes_per_token(tokenizer: Tokenizer, chapters: Sequence[str]) -> float:
    return sum(len(text.encode()) for text in chapters) / token_count(tokenizer, chapters)
