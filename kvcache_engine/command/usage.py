"""The group of commands: their order, and one-line errors for wrong usage."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from kvcache_engine.command.exit_codes import INTERRUPTED
from kvcache_engine.command.reporting import one_line

__all__ = ["CommandGroup"]

ORDER = ("generate", "chat", "serve", "save", "load", "inspect", "backends", "conformance", "bench")
"""The order of commands in ``kvcache --help``; others follow."""
TEXTS = {"prompt", "stop", "kv_events_topic"}
"""Options that may be empty, or that have their own error message."""
USAGE_ERROR: type[Any] = typer.BadParameter.__mro__[2]
"""click's ClickException, the base of all usage errors; typer exports only its subclasses."""


class CommandGroup(TyperGroup):
    """typer's group, with usage errors as one line on stderr and exit code 2."""

    def list_commands(self, ctx: Any) -> list[str]:
        names = super().list_commands(ctx)
        return [name for name in ORDER if name in names] + [name for name in names if name not in ORDER]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        for option in getattr(command, "params", ()):
            if option.name in TEXTS or getattr(option, "is_flag", False):
                continue
            if not ctx.resilient_parsing and "" in _values(option, rest):
                raise typer.BadParameter(f"{_name(option)} is empty; give a value, or omit the option")
        return name, command, rest

    def make_context(self, *args: Any, **extra: Any) -> Any:
        with _interruption_told():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        with _interruption_told():
            return super().invoke(ctx)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        words = (args, prog_name, complete_var, False, windows_expand_args)
        if not standalone_mode:
            return super().main(*words, **extra)
        try:
            code = super().main(*words, **extra)
        except typer.Abort:  # Ctrl-C outside of the two handlers above
            typer.echo("kvcache: interrupted", err=True)
            sys.exit(INTERRUPTED)
        except USAGE_ERROR as error:
            if type(error).__name__ == "NoArgsIsHelpError":  # ``kvcache`` without arguments: the full help
                error.show()
            else:
                arguments = sys.argv[1:] if args is None else args
                typer.echo(_usage_line(error, self._command(error, arguments), arguments), err=True)
            sys.exit(error.exit_code)
        except BrokenPipeError:
            raise
        except OSError as error:  # for example --help to a full device
            typer.echo(f"kvcache: the output cannot be written ({error.strerror or error})", err=True)
            sys.exit(1)
        sys.exit(code if isinstance(code, int) else 0)

    def _command(self, error: Any, args: Sequence[str]) -> str:
        """The command's path, such as 'kvcache generate', which an error in its options does not contain."""
        context = getattr(error, "ctx", None)
        if context is not None:
            return str(context.command_path)
        name = next((word for word in args if not word.startswith("-")), "")
        return f"kvcache {name}" if name in self.commands else "kvcache"


@contextlib.contextmanager
def _interruption_told() -> Iterator[None]:
    """Report Ctrl-C before or after a command, which typer would ignore silently."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("kvcache: interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _usage_line(error: Any, command: str, args: Sequence[str]) -> str:
    """'kvcache generate: --max-tokens is 'many'; it must be a whole number'."""
    kind, param = type(error).__name__, getattr(error, "param", None)
    text = one_line(error.format_message()).rstrip(".")
    if kind == "MissingParameter" and param is not None:
        what = one_line(param.help or "").rstrip(".")
        return f"{command}: missing {_name(param)}{f': {_begun_small(what)}' if what else ''}"
    if kind == "BadParameter":
        return f"{command}: {_wrong_value(error, param, args)}"
    text = _begun_small(text.replace("(Possible options: ", "(perhaps "))
    return f"{command}: {text}{'' if text.endswith('?') else ';'} {command} --help lists the options"


def _wrong_value(error: Any, param: Any, args: Sequence[str]) -> str:
    text = one_line(error.message).removeprefix("Value error, ").rstrip(".")
    if param is None:
        return _begun_small(text)
    for message, wanted in _WANTED:
        text = message.sub(wanted, text)
    value = _given(error, args)
    return f"{_name(param)}{'' if value is None else f' is {value!r}'}; it must be {text}"


_WANTED = [
    (re.compile(pattern), text)
    for pattern, text in {
        "^Input should be greater than or equal to ": "at least ",
        "^Input should be less than or equal to ": "at most ",
        "^Input should be a valid integer.*": "a whole number",
        "^Input should be a valid number.*": "a number",
        "^.* is not one of ": "one of ",
        "^Input should be ": "",
    }.items()
]
"""typer's messages for wrong values, and our descriptions of valid ones."""


def _name(param: Any) -> str:
    """The name as typed: --max-tokens, or FILE."""
    return max(param.opts, key=len) if param.param_type_name == "option" else str(param.name).upper()


def _begun_small(text: str) -> str:
    return text[:1].lower() + text[1:]


def _given(error: Any, args: Sequence[str]) -> str | None:
    """The last value of the wrong option, which typer does not always include; None if there is none."""
    return next(reversed(_values(getattr(error, "param", None), args)), None)


def _values(param: Any, args: Sequence[str]) -> list[str | None]:
    """The values of an option, as typed."""
    values: list[str | None] = []
    for option in getattr(param, "opts", ()):
        for word, after in zip(args, [*args, None][1:], strict=True):
            if word == option:
                values.append(after)
            elif word.startswith(f"{option}="):
                values.append(word.removeprefix(f"{option}="))
    return values
