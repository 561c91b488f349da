"""Sessions over one tree of snapshots: matched, restored, kept, evicted, and moved from tier to tier.

Others use ``PrefixCache`` and ``Session``, which ``kvcache`` has too, ``HostTier``, and ``StoreTier`` where
a runtime has a tree of its own; pictures also read ``PrefixTree``.
"""
