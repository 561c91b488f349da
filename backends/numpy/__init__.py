"""NumPy: the built-in default, always available, on the CPU. BF16 through ml_dtypes."""

from backends.numpy.plugin import ml_backend

__all__ = ["ml_backend"]
