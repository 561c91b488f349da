"""Muon for the matrices inside the layers, AdamW for the embedding and the norms, one schedule for both.

Why: after 200 steps of a 6-layer, 128-wide model on one seed, heldout.txt cost 1.59 bits per byte
with Muon (0.02) and 1.92 with AdamW alone (0.003, the only rate tried).
"""

from __future__ import annotations

from torch.optim import AdamW, Muon, Optimizer

from .model import Llama

__all__ = ["learning_rate_scale", "make_optimizers", "set_scale"]

MUON_LR, ADAM_LR = 0.03, 0.01
WEIGHT_DECAY = 0.1
WARMUP = 0.02


def make_optimizers(model: Llama) -> tuple[Optimizer, ...]:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or ".layers." not in name]
    muon = Muon(matrices, lr=MUON_LR, weight_decay=WEIGHT_DECAY, momentum=0.95)
    adam = AdamW(others, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0)
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return muon, adam


def learning_rate_scale(step: int, steps: int) -> float:
    """Linear warm-up over the first 2%, then linear down to nearly nothing: step is in [0, steps)."""
    warmup = max(1, int(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return (steps - step) / (steps - warmup + 1)


def set_scale(optimizers: tuple[Optimizer, ...], scale: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * scale
