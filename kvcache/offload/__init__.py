"""The way from the device to host memory and stores, and back.

Others use ``HostTier`` and ``StoreTier``, ``OffloadWorker`` and ``OffloadJob`` (a snapshot leaves the
device here), ``page_in`` and ``restore_page`` (read straight into the cache's memory), and ``LRUQueue``.
"""
