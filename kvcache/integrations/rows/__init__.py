"""Rows of a runtime's batch over our caches: shared by the integrations of transformers and mlx-lm.
``caches``: the caches of one model's layers, one of each kind. ``sequences``: which of their sequences are in
use, and by whom. ``driven``: a foreign model under the engine. No runtime is imported here; each
integration follows its runtime's calls layer by layer.
"""
