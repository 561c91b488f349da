"""Weights and configurations of checkpoints: safetensors, GGUF."""
