"""The command line, the training loop, and the Hugging Face folder that it writes."""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.nn.utils import clip_grad_norm_

from .card import Log, bits_per_byte, write_report
from .model import Llama, LlamaConfig, make_optimizers
from .text import BOS, EOS, PAD, SPECIAL, TrainTinyError, Windows, encode_chapters, read_bible, read_text
from .text import train_tokenizer as learn

BUNDLED = Path(__file__).resolve().parents[2] / "kvcache_engine" / "tiny"
DEFAULTS = {"text": None, "steps": 2200, "batch": 8, "seed": 0}
CLIP, WARMUP = 1.0, 0.02
CHECKPOINT_EVERY = 100


def main(argv: Sequence[str] | None = None) -> int:
    out = argparse.ArgumentParser("train_tiny", description="Train the bundled Llama.")
    out.add_argument("--out", type=Path, default=BUNDLED, help="folder to write (default: the bundled model)")
    out.add_argument("--text", type=Path, help="other text: a verse a line, blank lines between chapters")
    out.add_argument("--steps", type=_at_least(1), help="optimizer steps (default %(default)s)")
    out.add_argument("--batch", type=_at_least(1), help="windows of 512 tokens a step (default %(default)s)")
    out.add_argument("--seed", type=_at_least(0))
    out.set_defaults(**DEFAULTS)
    torch.set_num_threads(1)  # more sum in another order: the weights would depend on the machine's cores
    try:
        train(out.parse_args(argv))
    except TrainTinyError as e:
        print(f"train_tiny: {e}", file=sys.stderr)
        return 1
    return 0


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is not at least {least}")
        return value

    return number


def train(args: argparse.Namespace) -> None:
    """Train, leaving a usable model in `args.out` at every checkpoint, and the card after the last one."""
    corpus = read_text(args.text) if args.text else read_bible()
    torch.manual_seed(args.seed)
    tokenizer = learn(corpus.train, LlamaConfig().vocab_size)
    (newline,) = tokenizer.encode("\n", add_special_tokens=False).ids
    config = LlamaConfig(vocab_size=tokenizer.get_vocab_size())
    chapters = encode_chapters(tokenizer, corpus.train)
    windows = Windows(chapters, newline, config.max_position_embeddings, args.seed)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise TrainTinyError(f"--out {args.out}: {e.strerror}; give a folder") from e
    model = Llama(config)
    optimizers = make_optimizers(model)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    batches = windows.batches(args.batch)
    log = Log(_command_line(args), _machine(), args.seed, args.batch)
    recent: list[float] = []
    started = time.perf_counter()
    for done in range(1, args.steps + 1):
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * learning_rate_scale(done - 1, args.steps)
        inputs, targets = next(batches)
        with torch.autocast("cpu", dtype=torch.bfloat16):  # a third faster on a CPU that has such products
            logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), CLIP)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        recent.append(loss.item())
        if done % CHECKPOINT_EVERY == 0 or done == args.steps:
            log.seconds = time.perf_counter() - started
            held = bits_per_byte(model, tokenizer, corpus.shipped)
            log.points.append((done, round(sum(recent) / len(recent), 4), round(held, 4)))
            recent.clear()
            save_model(args.out, model, tokenizer)
            print(f"step {done}/{args.steps}  loss {log.points[-1][1]}  heldout.txt {held:.4f}", flush=True)
    write_report(args.out, load_model(args.out), tokenizer, corpus, log)


def learning_rate_scale(step: int, steps: int) -> float:
    """Linear warm-up over the first 2%, then linear down to nearly nothing: step is in [0, steps)."""
    warmup = max(1, int(WARMUP * steps))
    return (step + 1) / warmup if step < warmup else (steps - step) / (steps - warmup + 1)


def _command_line(args: argparse.Namespace) -> str:
    """The command that repeats this run."""
    changed = {name: value for name, default in DEFAULTS.items() if (value := getattr(args, name)) != default}
    return shlex.join(
        ["python", "examples/train_tiny", *(f"--{name}={value}" for name, value in changed.items())]
    )


def _machine() -> str:
    """The processor and the version of PyTorch, in words."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} with PyTorch {torch.__version__}"


def save_model(folder: Path, model: Llama, tokenizer: Tokenizer) -> None:
    """Write all that loading needs (weights in bf16); a folder that is there is brought up to date."""
    weights = {name: tensor.detach().to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    partial = folder / "model.safetensors.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # safetensors writes for the owner alone, and this file is packaged
    partial.replace(folder / "model.safetensors")
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(model.config),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "dtype": "bfloat16",
    }
    named = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL[PAD],
        "bos_token": SPECIAL[BOS],
        "eos_token": SPECIAL[EOS],
        "model_max_length": model.config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    for name, value in (("config.json", config), ("tokenizer_config.json", named)):
        (folder / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def load_model(folder: Path) -> Llama:
    """The model as shipped: bf16 weights, computed in float32."""
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = Llama(LlamaConfig(**{f.name: written[f.name] for f in fields(LlamaConfig)}))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()
