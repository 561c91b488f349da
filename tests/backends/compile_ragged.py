"""Compiles the ragged kernels for an H100 or H200, as test_torch_ragged.py has it do."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from backends.torch import triton_ragged
from backends.torch.ragged_work import Tile, choose_tile, padded
from ml.ragged import RaggedPlan

SHARED_BYTES = 227 << 10
"""What a program may have of shared memory there."""


def compiled(kernel: Any, pointers: dict[str, str], constants: dict[str, Any], tile: Tile) -> Any:
    """With pointers and strides that are multiples of 16, as those of tensors mostly are."""
    signature = {name: pointers.get(name, "i32") for name in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    even = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] in "*i"}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=even)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert ".target sm_90" in result.asm["ptx"]
    assert result.asm["cubin"]
    assert result.metadata.shared <= SHARED_BYTES
    return result


def attention(
    kind: str, group: int, head_dim: int, v_dim: int, tokens: int, sinks: bool, bits: tuple[int, int] = (0, 0)
) -> str:
    """The PTX of the kernel for a prompt of ``tokens``; over codes of 8 or 4 ``bits`` of K and V."""
    bounds = np.column_stack((np.arange(tokens), np.zeros(tokens), np.arange(1, tokens + 1))).astype(int)
    plan = RaggedPlan(tokens, np.array([[0, 0, tokens, 0, tokens]]), bounds, np.array([], dtype=np.int32))
    tile: Tile = choose_tile(plan, group, head_dim, v_dim, 4 if kind == "fp32" else 2)
    pointers = dict.fromkeys(("query", "key", "value", "sinks", "out"), f"*{kind}")
    pointers |= {"key_scales": "*fp16", "value_scales": "*fp16"}
    for name, size in zip(("key", "value"), bits, strict=True):
        pointers[name] = {0: pointers[name], 8: "*i8", 4: "*u8"}[size]
    pointers |= {"work": "*i32", "scratch": "*fp32", "scale": "fp32"}
    constants = {
        "GROUP": group, "HEADS_PER_TILE": tile.heads, "HEADS": 8 * group, "HEAD_DIM": head_dim,
        "V_DIM": v_dim, "PAD": padded(head_dim), "V_PAD": padded(v_dim), "BLOCK_M": tile.rows,
        "BLOCK_N": tile.keys, "INDEXED": sinks, "WIDEN": False, "SINKS": sinks,
        "K_BITS": bits[0], "V_BITS": bits[1], "ks_dim": 1, "vs_dim": 1,
        "q_dim": 1, "k_dim": 1, "v_dim": 1,
    }  # fmt: skip
    kernel = triton_ragged.attend_items
    ptx: str = compiled(kernel, pointers, constants, tile).asm["ptx"]
    return ptx


assert "mma.sync" in attention("fp16", 4, 40, 24, 1, sinks=True)
print("F16")
assert "wgmma" in attention("bf16", 4, 64, 64, 2048, sinks=False)
print("BF16")
assert "tf32" not in attention("fp32", 1, 12, 16, 16, sinks=True)
print("F32")
assert "wgmma" in attention("bf16", 4, 64, 64, 2048, sinks=False, bits=(8, 4))
assert "mma.sync" in attention("fp16", 4, 64, 32, 1, sinks=True, bits=(4, 8))
print("codes")
merged = {"HEADS": 32, "V_DIM": 80, "V_PAD": 128, "BLOCK": triton_ragged.MERGED_AT_ONCE, "SINKS": True}
pointers = {"work": "*i32", "sinks": "*fp32", "out": "*bf16", "scratch": "*fp32"}
compiled(triton_ragged.merge_parts, pointers, merged, Tile(1, 1, 1, 1, 3))
print("merge")
