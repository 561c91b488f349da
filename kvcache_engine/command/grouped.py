"""Groups of options as one parameter, so that commands need not declare each option."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints

__all__ = ["ungrouped"]


def ungrouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command in typer's form: each dataclass parameter is replaced by its fields as options. The fields
    are annotated like parameters of a command; all have defaults.
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
    for name, parameter in inspect.signature(command).parameters.items():
        if not is_dataclass(hints[name]):
            yield parameter.replace(kind=by_name, annotation=hints[name])
            continue
        kinds = get_type_hints(hints[name], include_extras=True)
        for each in fields(hints[name]):
            assert each.default is not MISSING, f"{name}.{each.name} has no default"
            yield inspect.Parameter(each.name, by_name, default=each.default, annotation=kinds[each.name])
