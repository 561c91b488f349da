"""These caches as the key-value cache of Hugging Face transformers.

``HFCache(model.config)`` replaces a ``DynamicCache``, ``HFStaticCache`` a ``StaticCache`` of fixed shapes;
``install()`` makes plain ``generate()`` use them. ``TransformersModel(model)`` is a model for our engine.
Importing this package registers ``attn_implementation="kvcache"``, with which attention reads the cache
itself.
"""

from kvcache.integrations.transformers import versions  # noqa: F401, I001  # first: it refuses what cannot work

from kvcache.integrations.transformers import attention  # noqa: F401
from kvcache.integrations.transformers.arguments import CacheOptions
from kvcache.integrations.transformers.cache import HFCache
from kvcache.integrations.transformers.install import Installation, install, uninstall
from kvcache.integrations.transformers.model import TransformersModel
from kvcache.integrations.transformers.prefixes import HFPrefixCache, HFSession
from kvcache.integrations.transformers.rope import rope_shift
from kvcache.integrations.transformers.saving import HFSnapshot
from kvcache.integrations.transformers.static import HFStaticCache

__all__ = [
    "CacheOptions",
    "HFCache",
    "HFPrefixCache",
    "HFSession",
    "HFSnapshot",
    "HFStaticCache",
    "Installation",
    "TransformersModel",
    "install",
    "rope_shift",
    "uninstall",
]


def __dir__() -> list[str]:
    return sorted(__all__)
