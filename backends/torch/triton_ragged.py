"""Attention by a ragged plan in two Triton kernels: one over its items, one that merges partial results.

Importing this module imports triton, a dependency of PyTorch's CUDA wheels. The softmax uses powers of 2, in
F32, key block by key block (Dao et al., FlashAttention-2, 2023), and products accumulate in F32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from backends.torch.ragged_work import Work, padded
from backends.torch.triton_launch import INTERPRETED, launch

MERGED_AT_ONCE = 8
"""Parts of a query that are merged at a time."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _dot(a, b, acc, WIDEN: tl.constexpr):
    """acc + a @ b, directly on a GPU; Triton's interpreter would multiply the bits of BF16."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _read(stored, rows, dims, mask, dtype: tl.constexpr, BITS: tl.constexpr):
    """Elements ``dims`` of ``rows``, whose shapes broadcast: plain numbers, or codes times scales of blocks.
    A byte has two 4-bit codes; the high ones belong to the second half of a block.
    """
    base, cell, dim, scales, scale_cell, scale_dim = stored
    if BITS == 0:
        return tl.load(base + dims * dim + rows * cell, mask=mask, other=0.0)
    scale = tl.load(scales + dims // 32 * scale_dim + rows * scale_cell, mask=mask, other=0.0)
    if BITS == 4:
        pairs = tl.load(base + (dims // 32 * 16 + dims % 16) * dim + rows * cell, mask=mask, other=0)
        codes = ((pairs.to(tl.int32) >> (dims % 32 // 16 * 4)) & 15) - 8
    else:
        codes = tl.load(base + dims * dim + rows * cell, mask=mask, other=0)
    return (codes.to(tl.float32) * scale.to(tl.float32)).to(dtype)


@triton.jit
def _attend_block(
    state, q, keys, values, index, item, place, limit, begins, ends, scale,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, V_PAD: tl.constexpr, BLOCK_N: tl.constexpr,
    INDEXED: tl.constexpr, WIDEN: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr,
    BOUNDED: tl.constexpr,
):  # fmt: skip
    """Process one block of keys from ``place`` of the segment on, visible to every row unless BOUNDED."""
    top, total, acc = state
    gathered, start = item
    places = place + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, q.shape[1])
    v_dims = tl.arange(0, V_PAD)
    inside = places < limit
    rows = start + places
    if INDEXED:
        listed = tl.load(index + rows, mask=places < tl.where(gathered != 0, limit, 0), other=0)
        rows = tl.where(gathered != 0, listed, rows)
    rows = rows.to(tl.int64)
    k_mask = (dims < HEAD_DIM)[:, None]
    v_mask = (v_dims < V_DIM)[None, :]
    if BOUNDED:
        k_mask = k_mask & inside[None, :]
        v_mask = v_mask & inside[:, None]
    k = _read(keys, rows[None, :], dims[:, None], k_mask, q.dtype, K_BITS)
    v = _read(values, rows[:, None], v_dims[None, :], v_mask, q.dtype, V_BITS)
    scores = _dot(q, k, tl.zeros((q.shape[0], BLOCK_N), tl.float32), WIDEN) * scale
    if BOUNDED:
        seen = (places[None, :] >= begins[:, None]) & (places[None, :] < ends[:, None]) & inside[None, :]
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    # For a row that has seen nothing yet, -inf minus -inf would be NaN.
    finite = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - finite[:, None])
    shrink = tl.exp2(top - finite)
    acc = acc * shrink[:, None]
    if BOUNDED:
        # 0 times NaN is NaN: values seen by one row of the tile must not affect rows that do not see them.
        # Infinity counts as NaN here.
        broken = (v.to(tl.float32) - v.to(tl.float32)) != 0.0
        if tl.max(broken.to(tl.int32)) > 0:
            v = tl.where(broken, 0.0, v)
            reached = tl.dot(seen.to(tl.float16), broken.to(tl.float16)) > 0
            acc = tl.where(reached, float("nan"), acc)
    acc = _dot(weights.to(v.dtype), v, acc, WIDEN)
    return higher, total * shrink + tl.sum(weights, 1), acc


@triton.jit
def attend_items(
    query, key, value, key_scales, value_scales, work, sinks, out, scratch, scale,
    q_token, q_head, q_dim, k_cell, k_head, k_dim, v_cell, v_head, v_dim,
    ks_cell, ks_head, ks_dim, vs_cell, vs_head, vs_dim, sink_step,
    GROUP: tl.constexpr, HEADS_PER_TILE: tl.constexpr, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, PAD: tl.constexpr, V_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    INDEXED: tl.constexpr, WIDEN: tl.constexpr, SINKS: tl.constexpr,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr,
):  # fmt: skip
    """Grid (items, KV heads * tiles of a KV head's query heads); see Work for the content of ``work``.

    A row is a reader and a query head. Rows with a slot write attention and log-sum-exp to ``scratch``:
    (slots, heads, v_dim), then (slots, heads); the others write to ``out`` (tokens, heads, v_dim).
    """
    number = tl.program_id(0)
    if number >= tl.load(work):
        return
    SPLITS: tl.constexpr = (GROUP + HEADS_PER_TILE - 1) // HEADS_PER_TILE
    kv_head = tl.program_id(1) // SPLITS
    slots = tl.load(work + 2)
    item = work + tl.load(work + 3) + number * 8
    low, first, stop, high = tl.load(item + 2), tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
    row = tl.arange(0, BLOCK_M)
    in_group = (tl.program_id(1) % SPLITS) * HEADS_PER_TILE + row % HEADS_PER_TILE
    reader = row // HEADS_PER_TILE
    used = (reader < tl.load(item + 7)) & (in_group < GROUP)
    pair = work + tl.load(work + 4) + (tl.load(item + 6) + reader) * 4
    token = tl.load(pair, mask=used, other=0).to(tl.int64)
    begins = tl.load(pair + 1, mask=used, other=0)
    ends = tl.load(pair + 2, mask=used, other=0)
    slot = tl.load(pair + 3, mask=used, other=-2)
    head = kv_head * GROUP + in_group
    dims = tl.arange(0, PAD)
    q = tl.load(
        query + token[:, None] * q_token + head[:, None].to(tl.int64) * q_head + dims[None, :] * q_dim,
        mask=used[:, None] & (dims < HEAD_DIM)[None, :], other=0.0,
    )  # fmt: skip
    wide_head = kv_head.to(tl.int64)
    keys = (key + wide_head * k_head, k_cell, k_dim, key_scales + wide_head * ks_head, ks_cell, ks_dim)
    values = (value + wide_head * v_head, v_cell, v_dim, value_scales + wide_head * vs_head, vs_cell, vs_dim)
    index = work + tl.load(work + 6)
    where = (tl.load(item), tl.load(item + 1))
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, V_PAD), tl.float32)
    scale *= LOG2_E
    for place in range(first, stop, BLOCK_N):
        top, total, acc = _attend_block(
            (top, total, acc), q, keys, values, index, where, place, stop, begins, ends, scale,
            HEAD_DIM, V_DIM, V_PAD, BLOCK_N, INDEXED, WIDEN, K_BITS, V_BITS, False,
        )  # fmt: skip
    before = tl.cdiv(first - low, BLOCK_N)
    for block in tl.range(0, before + tl.cdiv(high - stop, BLOCK_N), num_stages=1):
        left = block < before
        place = tl.where(left, low + block * BLOCK_N, stop + (block - before) * BLOCK_N)
        top, total, acc = _attend_block(
            (top, total, acc), q, keys, values, index, where, place, tl.where(left, first, high),
            begins, ends, scale, HEAD_DIM, V_DIM, V_PAD, BLOCK_N, INDEXED, WIDEN, K_BITS, V_BITS, True,
        )  # fmt: skip

    v_dims = tl.arange(0, V_PAD)
    kept = (v_dims < V_DIM)[None, :]
    part = slot.to(tl.int64) * HEADS + head
    filled = tl.where(total == 0.0, 1.0, total)
    tl.store(
        scratch + part[:, None] * V_DIM + v_dims[None, :], acc / filled[:, None], (slot >= 0)[:, None] & kept
    )
    tl.store(scratch + slots.to(tl.int64) * HEADS * V_DIM + part, top + tl.log2(filled), slot >= 0)
    if SINKS:
        sink = tl.load(sinks + head * sink_step, mask=used, other=0.0).to(tl.float32) * LOG2_E
        highest = tl.maximum(top, sink)
        shrink = tl.exp2(top - highest)
        acc = acc * shrink[:, None]
        filled = filled * shrink + tl.exp2(sink - highest)
    place = out + (token * HEADS + head)[:, None] * V_DIM + v_dims[None, :]
    tl.store(place, (acc / filled[:, None]).to(out.dtype.element_ty), (slot == -1)[:, None] & kept)


@triton.jit
def merge_parts(
    work, sinks, out, scratch, sink_step,
    HEADS: tl.constexpr, V_DIM: tl.constexpr, V_PAD: tl.constexpr, BLOCK: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Grid (merged queries, heads): merge the parts of each, weighted by their log-sum-exp."""
    number = tl.program_id(0)
    if number >= tl.load(work + 1):
        return
    head = tl.program_id(1)
    merge = work + tl.load(work + 5) + number * 3
    token, first, stop = tl.load(merge).to(tl.int64), tl.load(merge + 1), tl.load(merge + 2)
    lse = scratch + tl.load(work + 2).to(tl.int64) * HEADS * V_DIM
    v_dims = tl.arange(0, V_PAD)
    kept = v_dims < V_DIM
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    if SINKS:
        top = tl.load(sinks + head * sink_step).to(tl.float32) * LOG2_E
        total = tl.where(top == float("-inf"), 0.0, 1.0)
    acc = tl.zeros((V_PAD,), tl.float32)
    for start in range(first, stop, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        part = slot.to(tl.int64) * HEADS + head
        there = slot < stop
        logits = tl.load(lse + part, mask=there, other=float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 0))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(top - finite)
        weights = tl.exp2(logits - finite)
        parts = tl.load(
            scratch + part[:, None] * V_DIM + v_dims[None, :],
            mask=there[:, None] & kept[None, :], other=0.0,
        )  # fmt: skip
        acc = acc * shrink + tl.sum(parts * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        top = higher
    place = out + (token * HEADS + head) * V_DIM + v_dims
    tl.store(place, (acc / total).to(out.dtype.element_ty), kept)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    work: Work,
    packed: torch.Tensor,
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    bits: tuple[int, int] = (0, 0),
) -> torch.Tensor:
    """q (tokens, heads, D), k and v (cells, kv_heads, ...) with any strides -> (tokens, heads, v_dim). If
    ``bits`` of K or V are 8 or 4, these are codes of Q8_0 or Q4_0 with their ``scales``. ``packed`` is the
    work's, on the same device. One launch, and a second if queries are merged; neither waits for the device.
    """
    tokens, heads, head_dim = q.shape
    kv_heads, width = v.shape[1:]
    v_dim = width * 8 // (bits[1] or 8)
    tile, group = work.tile, heads // kv_heads
    out = q.new_empty((tokens, heads, v_dim))
    scratch = q.new_empty(work.slots * heads * (v_dim + 1), dtype=torch.float32)
    sink, step = (out, 0) if sinks is None else (sinks, sinks.stride(0))
    scale_tensors = [out if one is None else one for one in scales]
    steps = [stride for x in (q, k, v, *scale_tensors) for stride in x.stride()]
    with torch.cuda.device_of(q):
        launch(
            attend_items, (work.items, kv_heads * -(-group // tile.heads)),
            (q, k, v, *scale_tensors, packed, sink, out, scratch), (float(scale),), (*steps, step),
            {
                "GROUP": group, "HEADS_PER_TILE": tile.heads, "HEADS": heads, "HEAD_DIM": head_dim,
                "V_DIM": v_dim, "PAD": padded(head_dim), "V_PAD": padded(v_dim), "BLOCK_M": tile.rows,
                "BLOCK_N": tile.keys, "INDEXED": work.indexed,
                "WIDEN": INTERPRETED and q.dtype is torch.bfloat16, "SINKS": sinks is not None,
                "K_BITS": bits[0], "V_BITS": bits[1],
            }, tile.warps, tile.stages,
        )  # fmt: skip
        if work.merges:
            launch(
                merge_parts, (work.merges, heads), (packed, sink, out, scratch), (), (step,),
                {
                    "HEADS": heads, "V_DIM": v_dim, "V_PAD": padded(v_dim), "BLOCK": MERGED_AT_ONCE,
                    "SINKS": sinks is not None,
                }, 1 if v_dim <= 128 else 4, 3,
            )  # fmt: skip
    return out
