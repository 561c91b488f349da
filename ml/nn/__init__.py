"""Building blocks of models, written once on Tensor.

>>> import ml, ml.nn
>>> with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
...     q = ctx.zeros((1, 4, 8), ml.DType.F32)
...     kv = ctx.full((3, 2, 8), 2.0, ml.DType.F32)
...     ml.nn.attention(ctx, q, kv, kv).to_numpy().mean().item()
2.0
"""

from ml.nn.attention import attention, generic_attention, offers
from ml.nn.grouped import Groups, generic_grouped_matmul, grouped_matmul
from ml.nn.latent import latent_attention
from ml.nn.layers import embedding, l2_norm, layer_norm, linear, rms_norm, softplus, swiglu
from ml.nn.logprobs import logprobs, logprobs_on_host
from ml.nn.partial import (
    Part,
    generic_partial_attention,
    merge_attention,
    merge_parts,
    partial_attention,
    partial_in_blocks,
)
from ml.nn.rejection import Drafted, RejectionSampler, draw, reject_on_host
from ml.nn.rope import Positions, Rotation, apply_rope, multi_axis_tables, rope, rope_shift, rope_tables
from ml.nn.rope_config import parse_rope
from ml.nn.rope_spec import RopeSpec
from ml.nn.sampling import BatchSampler, Draws, probabilities_on_host, sample_on_host
from ml.nn.scaling import FactorScaling, LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from ml.nn.sequences import causal_conv1d, cumsum, pad

__all__ = [
    "BatchSampler",
    "Drafted",
    "Draws",
    "FactorScaling",
    "Groups",
    "LinearScaling",
    "Llama3Scaling",
    "Part",
    "Positions",
    "RejectionSampler",
    "RopeScaling",
    "RopeSpec",
    "Rotation",
    "YarnScaling",
    "apply_rope",
    "attention",
    "causal_conv1d",
    "cumsum",
    "draw",
    "embedding",
    "generic_attention",
    "generic_grouped_matmul",
    "generic_partial_attention",
    "grouped_matmul",
    "l2_norm",
    "latent_attention",
    "layer_norm",
    "linear",
    "logprobs",
    "logprobs_on_host",
    "merge_attention",
    "merge_parts",
    "multi_axis_tables",
    "offers",
    "pad",
    "parse_rope",
    "partial_attention",
    "partial_in_blocks",
    "probabilities_on_host",
    "reject_on_host",
    "rms_norm",
    "rope",
    "rope_shift",
    "rope_tables",
    "sample_on_host",
    "softplus",
    "swiglu",
]
