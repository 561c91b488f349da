"""Rows of a runtime's batch over our caches: what the caches inside transformers and mlx-lm have in common.

``caches``: the caches of one model's layers, one of each kind. ``sequences``: which of their sequences are in
use, and by whom. ``dense_batch``: several sequences read as one tensor. No runtime is imported here: how rows
follow its calls, layer by layer, is with each.
"""
