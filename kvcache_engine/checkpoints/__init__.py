"""Weights, configurations and vocabularies in files: safetensors, GGUF.

Others use ``weights`` and ``source``; ``kvcache_engine.loading`` puts models together from them.
"""
