"""The command line: text in, a Hugging Face folder with its model card out."""

from __future__ import annotations

import argparse
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from .corpus import Corpus, read_bible, read_text
from .errors import TrainTinyError
from .evaluate import bits_per_byte
from .export import save_model
from .log import Log
from .model import Llama, LlamaConfig
from .report import write_report
from .tokenizer import newline_id, train_tokenizer
from .train import Plan, train
from .windows import Windows, encode_chapters

__all__ = ["main"]

REPOSITORY = Path(__file__).resolve().parents[2]
BUNDLED = REPOSITORY / "kvcache" / "runner" / "tiny"
STEPS = 2200


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    torch.set_num_threads(
        1
    )  # more threads sum in another order: the weights would depend on the machine's cores
    try:
        corpus = read_text(args.text) if args.text else read_bible()
        log = Log.read(args.out / "training_log.json") if args.report else train_model(args, corpus)
        write_report(args.out, corpus, log)
    except TrainTinyError as e:
        print(f"train_tiny: {e}", file=sys.stderr)
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        "train_tiny", description="Train the bundled Llama on the King James Bible."
    )
    out.add_argument("--out", type=Path, default=BUNDLED, help="folder to write (default: the bundled model)")
    out.add_argument("--text", type=Path, help="other text: a verse a line, blank lines between chapters")
    out.add_argument("--steps", type=positive, default=STEPS, help="optimizer steps (default %(default)s)")
    out.add_argument(
        "--batch", type=positive, default=8, help="windows of 512 tokens a step (default %(default)s)"
    )
    out.add_argument("--seed", type=int, default=0)
    out.add_argument("--report", action="store_true", help="do not train: judge what lies in --out again")
    return out


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def train_model(args: argparse.Namespace, corpus: Corpus) -> Log:
    """Train, leaving a usable model in `args.out` at every checkpoint."""
    torch.manual_seed(args.seed)
    tokenizer = train_tokenizer(corpus.train, LlamaConfig().vocab_size)
    config = LlamaConfig(vocab_size=tokenizer.get_vocab_size())
    chapters = encode_chapters(tokenizer, corpus.train)
    windows = Windows(chapters, newline_id(tokenizer), config.max_position_embeddings, args.seed)
    model = Llama(config)
    log = Log(command_line(args), machine(), args.seed, args.batch)
    print(f"{model.parameter_count():,} parameters, {len(windows.stream):,} training tokens", flush=True)

    def checkpoint(step: int) -> None:
        log.heldout.append((step, round(bits_per_byte(model, tokenizer, corpus.shipped), 4)))
        save_model(args.out, model, tokenizer)
        print(
            f"step {step}  heldout.txt {log.heldout[-1][1]:.4f} bits per byte  saved {args.out}", flush=True
        )

    train(model, windows, Plan(args.steps, args.batch), log, checkpoint)
    return log


def command_line(args: argparse.Namespace) -> str:
    """The command that repeats this run."""
    names = ("text", "steps", "batch", "seed")
    changed = {
        name: getattr(args, name) for name in names if getattr(args, name) != parser().get_default(name)
    }
    return shlex.join(
        ["python", "examples/train_tiny", *(f"--{name}={value}" for name, value in changed.items())]
    )


def machine() -> str:
    """The processor and the version of PyTorch, in words."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} with PyTorch {torch.__version__}"
