"""Sessions over a radix tree of snapshots, which are matched, restored, kept, evicted and moved between
tiers.

Used by other packages: ``PrefixCache`` and ``Session``, which ``kvcache`` exports, ``HostTier``, and
``StoreTier`` for runtimes with a tree of their own; pictures also read ``PrefixTree``.
"""
