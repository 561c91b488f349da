"""Weights, configurations and vocabularies in files: safetensors, GGUF.

Other packages use ``weights`` and ``source``; ``kvcache_engine.loading`` assembles models from them.
"""
