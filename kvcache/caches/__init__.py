"""The caches, composed of storage, a forward pass and snapshots.

Public are ``CausalCache``, ``SlidingWindowCache``, ``ChunkedCache``, ``CompressedCache``, ``EncoderCache``,
``StateCache``, ``WrapperCache`` and ``RecurrentCache``, which ``kvcache`` exports, and ``branches``, which
forks, keeps, marks and rolls back sequences of any of them.
"""
