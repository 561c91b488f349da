"""The caches, put together from storage, a pass, and snapshots.

Others use ``CausalCache``, ``SlidingWindowCache``, ``ChunkedCache``, ``EncoderCache``, ``RecurrentCache``,
``WrapperCache``, which ``kvcache`` has too, and ``branches``: fork, keep, mark and roll back on any of
them.
"""
