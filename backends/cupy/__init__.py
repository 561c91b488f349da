"""CuPy, on NVIDIA GPUs: NumPy's translation on raw device memory. BF16 through ml_dtypes."""

from backends.cupy.plugin import ml_backend

__all__ = ["ml_backend"]
