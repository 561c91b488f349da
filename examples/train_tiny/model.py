"""A Llama in plain PyTorch whose parameter names are those of Hugging Face's `LlamaForCausalLM`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The shape of the model, in the names of Hugging Face's config.json."""

    vocab_size: int = 2048
    hidden_size: int = 192
    intermediate_size: int = 416
    num_hidden_layers: int = 4
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 512
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


def rope_table(config: LlamaConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (positions, head_dim), half-split: both halves hold the same angles."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(torch.arange(config.max_position_embeddings).float(), config.rope_theta**-half)
    both = torch.cat([angles, angles], dim=-1)
    return both.cos(), both.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (batch, heads, tokens, head_dim): dimension i pairs with i + head_dim / 2."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


class Attention(nn.Module):
    """Causal attention in which several query heads share one key and value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query = rotate(self.heads(self.q_proj(x)), cos, sin)
        key = rotate(self.heads(self.k_proj(x)), cos, sin)
        value = self.heads(self.v_proj(x))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        joined: Tensor = self.o_proj(out.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))
        return joined


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One layer: attention and SwiGLU, each on a normalised copy of the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Llama(nn.Module):
    """The language model; the embedding matrix is also the output matrix."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.model.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        for name, values in zip(("cos", "sin"), rope_table(config), strict=True):
            self.register_buffer(name, values, persistent=False)
        # Normal(0, 0.02); what writes into the residual stream is scaled down by the number of writers.
        residual_std = 0.02 / math.sqrt(2 * config.num_hidden_layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=residual_std if into_residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, tokens, vocab) for token ids (batch, tokens)."""
        x = self.model.embed_tokens(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)


def make_optimizers(model: Llama) -> tuple[Optimizer, ...]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms.

    After 200 steps of a 6-layer, 128-wide model on one seed, heldout.txt cost 1.59 bits per byte with Muon
    (0.02) and 1.92 with AdamW alone (0.003, the only rate tried).
    """
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and ".layers." in name]
    others = [p for name, p in named if p.ndim != 2 or ".layers." not in name]
    muon = Muon(matrices, lr=0.03, weight_decay=0.1, momentum=0.95)
    return muon, AdamW(others, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
