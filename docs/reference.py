"""The hook of mkdocs that writes the reference from ``__all__`` of the packages: a page for each class.

A package's functions and constants share a page. A name that several packages offer has its page under the
first of them. ``Markdown``, an extension of griffe, rewrites docstrings that are laid out for a terminal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe
from mkdocs.structure.files import File

PACKAGES = (
    "kvcache",
    "kvcache.cache",
    "kvcache.stores",
    "kvcache.views",
    "kvcache.integrations.transformers",
    "kvcache.integrations.mlx_lm",
    "kvcache.integrations.vllm",
    "kvcache.integrations.vllm.options",
    "kvcache.integrations.sglang",
    "kvcache.integrations.lmcache",
    "kvcache.testing",
    "kvcache.testing.bench",
    "kvcache_engine",
    "kvcache_engine.saved",
    "kvcache_engine.serve",
    "ml",
    "ml.base",
    "ml.distributed",
    "ml.nn",
    "ml.strided",
    "ml.testing",
)
HEAD = '---\ntitle: "{}"\nsearch:\n  boost: {}\n---\n\n'
"""Guides come before the reference in search, and overviews last."""


class Markdown(griffe.Extension):
    """Doctests become blocks of code, and the ``::`` before a block becomes a colon."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        self.on_object(obj=pkg)


def markdown(docstring: str) -> str:
    parts = re.split(r"\n\s*\n", docstring)
    for at, part in enumerate(parts):
        if part.lstrip().startswith(">>>"):
            indent = part[: len(part) - len(part.lstrip())]
            parts[at] = f"{indent}```pycon\n{part}\n{indent}```"
        elif part.startswith("PYTEST_DONT_REWRITE"):
            parts[at] = ""
    return re.sub(r"::$", ":", "\n\n".join(parts), flags=re.MULTILINE).strip()


def on_files(files: Any, config: Any) -> Any:
    handler = config.plugins["mkdocstrings"].get_handler("python")
    shown: set[str] = set()
    navigation: list[dict[str, Any]] = []
    for package in PACKAGES:
        module = handler.collect(package, handler.get_options({}))
        pages = dict(pages_of(module, shown))
        for path, text in pages.items():
            files.append(File.generated(config, path, content=text))
        navigation.append({package: list(pages)})
    config["nav"].append({"Reference": navigation})
    return files


def pages_of(module: Any, shown: set[str]) -> Iterator[tuple[str, str]]:
    """The pages of a package by their paths: its overview, a page a class, and one of all else."""
    folder = f"reference/{module.path}"
    members = [module[name] for name in sorted(module.exports) if module[name].canonical_path not in shown]
    shown.update(member.canonical_path for member in members)
    classes = [member for member in members if member.is_class]
    others = [member for member in members if not member.is_class]
    rows = [f"| [`{one.name}`]({one.name}.md) | {summary(one)} |" for one in classes]
    rows += [f"| [`{one.name}`](functions.md#{one.path}) | {summary(one)} |" for one in others]
    table = "\n".join(["| name | what it is |", "|---|---|", *rows])
    text = module.docstring.value if module.docstring else ""
    yield f"{folder}/index.md", f"{HEAD.format(module.path, 0.2)}# {module.path}\n\n{text}\n\n{table}\n"
    for one in classes:
        options = f"    options:\n      inherited_members: {inherited(one)}\n"
        if module.path == "ml.base":  # whose hooks, with one underscore, are for backends to fill in
            options += '      filters: ["!^__", "!^_operand$"]\n'
        yield f"{folder}/{one.name}.md", f"{HEAD.format(one.name, 0.5)}::: {one.path}\n{options}"
    if others:
        title = f"{module.path}: functions"
        parts = (f"::: {one.path}\n    options:\n      heading_level: 2\n" for one in others)
        yield f"{folder}/functions.md", f"{HEAD.format(title, 0.5)}# {title}\n\n" + "\n".join(parts)


def summary(member: Any) -> str:
    """The first sentence of a docstring, for a cell of a table."""
    if not member.docstring:
        return ""
    first = " ".join(member.docstring.value.split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", first)[0].rstrip(".").replace("|", "\\|")


def inherited(member: Any) -> list[str]:
    """The public names that a class has from bases, but for those that the page of a base has."""
    elsewhere = {
        found.canonical_path for base in member.mro() if has_page(base) for found in base.all_members.values()
    }
    return [
        name
        for name, found in member.inherited_members.items()
        if not name.startswith("_") and found.canonical_path not in elsewhere
    ]


def has_page(member: Any) -> bool:
    return any(member.name in (module.exports or ()) for module in parents(member) if module.path in PACKAGES)


def parents(member: Any) -> Iterator[Any]:
    while member.parent is not None:
        member = member.parent
        yield member
