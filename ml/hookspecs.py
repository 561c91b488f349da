"""The hook that a backend plugin implements.

A plugin is any module (or object) named by an entry point of the group ``ml.backends``, with::

    from ml import BackendSpec, hookimpl

    @hookimpl
    def ml_backend() -> BackendSpec: ...

The module must import without its framework: ``probe`` and ``open`` import it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from ml.backend_spec import BackendSpec

PROJECT = "ml"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def ml_backend() -> BackendSpec:  # type: ignore[empty-body]
    """The record of one backend."""
