"""What K and V are stored in: plain numbers, block formats, FP8, affine groups, and formats of one's own.

``CacheFormat.of(dtype)`` is the format of keys and that of values which ``init(dtype=...)`` asks for, and
``open_format`` gives one by its name. A format of one's own may be built with ``operations``.
"""

from kvcache.storage.formats.cache_format import CacheFormat
from kvcache.storage.formats.names import format_names, open_format
from kvcache.storage.formats.plain import Plain
from kvcache.storage.formats.rotated import Rotated

__all__ = ["CacheFormat", "Plain", "Rotated", "format_names", "open_format"]
