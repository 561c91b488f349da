"""What K and V are stored in: plain numbers, block formats, FP8, affine groups, and what plugins bring.

``CacheFormat.of(dtype)`` is the format of keys and that of values which ``init(dtype=...)`` asks for, and
``open_format`` gives one by its name. A plugin is an entry point of the group ``kvcache.formats`` with
``FormatSpec`` and ``hookimpl``; its formats may be built with ``operations``.
"""

from kvcache.storage.formats.cache_format import CacheFormat
from kvcache.storage.formats.hookspecs import FormatSpec, hookimpl
from kvcache.storage.formats.plain import Plain
from kvcache.storage.formats.plugins import format_names, open_format
from kvcache.storage.formats.rotated import Rotated

__all__ = ["CacheFormat", "FormatSpec", "Plain", "Rotated", "format_names", "hookimpl", "open_format"]
