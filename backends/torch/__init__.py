"""PyTorch: CPU, CUDA and MPS. Importing this package does not import torch; probe and open do."""

from backends.torch.plugin import ml_backend

__all__ = ["ml_backend"]
