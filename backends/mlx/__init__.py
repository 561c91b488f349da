"""MLX: arrays of Apple's framework, on the CPU, on Metal, and on CUDA where MLX has it."""

from backends.mlx.plugin import ml_backend

__all__ = ["ml_backend"]
