"""Storage formats of K and V: plain numbers, block formats, FP8, affine groups, and custom formats.

``CacheFormat.of(dtype)`` returns the formats of keys and values for ``init(dtype=...)``, and ``open_format``
returns one by name. Custom formats can be built with ``operations``.
"""

from kvcache.storage.formats.cache_format import CacheFormat
from kvcache.storage.formats.names import format_names, open_format
from kvcache.storage.formats.plain import Plain
from kvcache.storage.formats.rotated import Rotated

__all__ = ["CacheFormat", "Plain", "Rotated", "format_names", "open_format"]
