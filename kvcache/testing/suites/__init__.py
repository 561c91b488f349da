"""The areas of the cache suite; ``kvcache.testing.CacheTests`` is all of them."""
