"""The engine's suite for a backend: the bundled model must say what it says on NumPy.

    pytest --pyargs kvcache_engine.testing --ml-backend=NAME

or, beside the other suites, ``kvcache conformance NAME``.
"""
