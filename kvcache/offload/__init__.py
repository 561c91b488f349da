"""The way from the device to host memory and stores, and back.

Others use ``HostTier`` and ``StoreTier``, ``OffloadWorker`` and ``OffloadJob`` (a snapshot leaves the
device here), and ``load_back`` and ``restore_serialized`` (straight into the cache's memory).
"""
