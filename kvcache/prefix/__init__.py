"""Sessions over a radix tree of snapshots: prefixes are matched, restored, kept and evicted.

Others use ``PrefixCache`` and ``Session``, which ``kvcache`` has too; pictures also read ``PrefixTree``. A
prefix is matched by ``PrefixMatcher``.
"""
