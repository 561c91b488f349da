"""What ``pytest --pyargs kvcache.testing --ml-backend=NAME`` collects."""

from kvcache.testing.cache import CacheTests


class TestCache(CacheTests):
    chosen_by_option = True
