"""The caches, put together from storage, a pass, and snapshots.

Others use ``CausalCache``, ``SlidingWindowCache``, ``ChunkedCache``, ``EncoderCache``, ``StateCache``,
``WrapperCache`` and ``RecurrentCache``, which ``kvcache`` has too, and ``branches``: fork, keep, mark and
roll back on any of them.
"""
