"""Options that go together as one parameter: a command that takes a group of them declares none of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints

__all__ = ["ungrouped"]


def ungrouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer wants it: in the place of each dataclass its fields, every one an option.

    The dataclasses' fields are annotated as parameters of a command are; all have defaults.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}

    @wraps(command)
    def run(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{each.name: given.pop(each.name) for each in fields(kind)})
        command(**given)

    parameters = [*_parameters(command, hints)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _parameters(command: Callable[..., None], hints: dict[str, Any]) -> Iterator[inspect.Parameter]:
    by_name = inspect.Parameter.KEYWORD_ONLY
    for name, given in inspect.signature(command).parameters.items():
        if not is_dataclass(hints[name]):
            yield given.replace(kind=by_name, annotation=hints[name])
            continue
        kinds = get_type_hints(hints[name], include_extras=True)
        for each in fields(hints[name]):
            assert each.default is not MISSING, f"{name}.{each.name} has no default"
            yield inspect.Parameter(each.name, by_name, default=each.default, annotation=kinds[each.name])
