"""The areas of the cache suite; :class:`kvcache.testing.CacheTests` is all of them."""
