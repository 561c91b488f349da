"""Pictures: what a look at a cache, a prefix cache, a mask, a store or a page gives.

Each is the plain data of one moment (``data.py``) that can draw itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from kvcache.cache import InvalidRangeError
from kvcache.views import html, svg, text
from kvcache.views.data import CacheData, MaskData, PageData, PictureData, PrefixData, StoreData
from kvcache.views.summaries import page_line, store_line

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["CachePicture", "MaskPicture", "PagePicture", "Picture", "PrefixPicture", "StorePicture"]


class Picture(PictureData):
    """What all pictures can do. ``print(picture)`` draws it as text, a notebook as HTML, rich in colours."""

    def text(self, width: int = 80) -> str:
        """Plain text of at most ``width`` columns, with no escape codes."""
        return text.plain(text.draw(self, width))

    def ansi(self, width: int = 80) -> str:
        """The same with colours, for a terminal."""
        return text.ansi(text.draw(self, width))

    def svg(self) -> str:
        """The drawing alone, as an SVG document."""
        return svg.document(self)

    def html(self, title: str = "") -> str:
        """A page that needs nothing but itself: drawings as inline SVG, tables, no script."""
        return html.page(self, title)

    def json(self) -> str:
        """``record()`` as JSON."""
        return json.dumps(self.record(), ensure_ascii=False)

    def save(self, path: str | Path) -> Path:
        """Write it as the ending of ``path`` says: .html, .svg, .json, .txt; InvalidRangeError for others."""
        path = Path(path)
        makers = {".html": self.html, ".svg": self.svg, ".json": self.json, ".txt": self.text}
        maker = makers.get(path.suffix.lower())
        if maker is None:
            raise InvalidRangeError(f"save: {path}; a picture ends in {', '.join(makers)}")
        path.write_text(maker(), encoding="utf-8")
        return path

    def __str__(self) -> str:
        return self.text()

    def __rich__(self) -> RenderableType:
        from kvcache.views.terminal import renderable  # rich is there where it is asked for

        return renderable(self)

    def _repr_html_(self) -> str:
        return html.fragment(self)


class CachePicture(Picture, CacheData):
    __doc__ = CacheData.__doc__


class PrefixPicture(Picture, PrefixData):
    __doc__ = PrefixData.__doc__
    cache: CachePicture


class MaskPicture(Picture, MaskData):
    __doc__ = MaskData.__doc__


class StorePicture(Picture, StoreData):
    __doc__ = StoreData.__doc__

    def summary(self) -> str:
        """One line: how many entries of how many bytes, and what is wrong with them."""
        return store_line(self)


class PagePicture(Picture, PageData):
    __doc__ = PageData.__doc__

    def summary(self) -> str:
        """One line: the positions it spans, its tokens and bytes."""
        return page_line(self)
