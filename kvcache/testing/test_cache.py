"""What ``pytest --pyargs kvcache.testing --ml-backend=NAME`` collects."""

from kvcache.testing.cache import CacheTests


class TestCache(CacheTests):
    """On the backend that ``--ml-backend`` names."""
