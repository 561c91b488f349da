"""The engine's suite for a backend: the bundled model must give the same answer as on NumPy.

    pytest --pyargs kvcache_engine.testing --ml-backend=NAME

or, with the other suites, ``kvcache conformance NAME``.
"""
