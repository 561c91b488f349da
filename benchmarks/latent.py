"""A decoding step over latents beside transformers' with its own caches: ``python -m benchmarks.latent``.

A DeepSeek of random weights: four dense layers, 16 heads of the sizes of the published ones, F32 on PyTorch.
All compute the same prompt, whose logits are compared, and take turns going on from there, on one thread.
transformers' caches store latents too; its model makes keys and values of each head of them in every step.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

import ml
from benchmarks.models import SMALL, random_model
from benchmarks.whole_model import PART, Ours, Theirs
from kvcache.testing.bench.timing import interleave, machine
from kvcache_engine import cache_bytes, load_config, load_model

DEEPSEEK: dict[str, Any] = {
    **SMALL, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64, "hidden_size": 512,
    "kv_lora_rank": 512, "q_lora_rank": 256, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 64, "first_k_dense_replace": 4, "bos_token_id": None, "eos_token_id": None,
    "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {
    "v3": {**DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
    "v3.2": {
        **DEEPSEEK, "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32",
        "index_n_heads": 16, "index_head_dim": 128, "index_topk": 1024,
    },
}  # fmt: skip


def full_bytes(config: Any) -> int:
    """Bytes of a token whose keys and values of each head are stored, in F32."""
    sizes = config.latent
    return int(config.layers * sizes.heads * (sizes.query_dim + sizes.v_dim) * ml.DType.F32.itemsize)


def measure(name: str, history: int, rounds: int) -> list[str]:
    """Rows of a table: who, bytes stored of a token, milliseconds of a step, times the time of ours."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        path = random_model(Path(folder), MODELS[name])
        theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        ours = load_model(path, ml.open_backend("torch", device="cpu"))
        config: Any = load_config(path)
    prompt = torch.randint(0, MODELS[name]["vocab_size"], (history,), generator=torch.manual_seed(0)).tolist()
    runs: dict[str, Ours | Theirs] = {"ours": Ours(ours, history)}
    for kind in ("DynamicCache", "StaticCache"):
        runs[f"transformers, {kind}"] = Theirs(theirs, kind, history)
    logits = []
    for run in runs.values():
        for begin in range(0, history, PART):
            found = run.forward(prompt[begin : begin + PART])
        logits.append(found.native[-1] if isinstance(found, ml.Tensor) else found)
    for theirs in logits[1:]:
        torch.testing.assert_close(logits[0], theirs, rtol=0, atol=1e-3)
    contenders = {name: run.contender() for name, run in runs.items()}
    samples = interleave(contenders, rounds, floors=["ours"]).samples()
    token = cache_bytes(config, ml.DType.F32, 1, 1)
    stored = f"{token:,} bytes a token; keys and values of each head: {full_bytes(config):,}"
    print(f"DeepSeek {name}: {stored}", flush=True)
    return [f"| {name}, {who} | {x.median / 1e3:.1f} | {x.ratio:.2f} |" for who, x in samples.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--model", choices=MODELS, nargs="*", default=["v3"])
    parser.add_argument("--history", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    rows = [row for name in options.model for row in measure(name, options.history, options.rounds)]
    print(f"| {options.history:,} tokens | ms | of ours |\n|---|---|---|", *rows, sep="\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
