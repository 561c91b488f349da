"""The group of commands: their order, and wrong usage told in one line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from kvcache.cli import INTERRUPTED

__all__ = ["CommandGroup", "one_line"]

ORDER = ("generate", "chat", "save", "load", "inspect", "backends", "conformance", "bench")
"""Of the list that ``kvcache --help`` shows; others follow."""
USAGE_ERROR: type[Any] = typer.BadParameter.__mro__[2]
"""What is raised for any wrong usage, click's ClickException: typer exports its subclasses alone."""


class CommandGroup(TyperGroup):
    """As typer's, but what is wrong with a command line is one line on stderr, and exit code 2."""

    def list_commands(self, ctx: Any) -> list[str]:
        names = super().list_commands(ctx)
        return [name for name in ORDER if name in names] + [name for name in names if name not in ORDER]

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
        except typer.Abort:  # Ctrl-C where neither of the two above was in charge
            typer.echo("kvcache: interrupted", err=True)
            sys.exit(INTERRUPTED)
        except USAGE_ERROR as error:
            if _is_help(error):
                error.show()
            else:
                typer.echo(_usage_line(error, sys.argv[1:] if args is None else args), err=True)
            sys.exit(error.exit_code)
        sys.exit(code if isinstance(code, int) else 0)


@contextlib.contextmanager
def _interruption_told() -> Iterator[None]:
    """Ctrl-C before a command has begun, or after it, which typer would end without a word."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("kvcache: interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None


def one_line(text: object) -> str:
    return " ".join(str(text).split())


def _is_help(error: Any) -> bool:
    """Raised by ``kvcache`` alone, whose message is all of its help."""
    return type(error).__name__ == "NoArgsIsHelpError"


def _usage_line(error: Any, args: Sequence[str]) -> str:
    """'kvcache generate: no such option: --nonsense; kvcache generate --help lists what there is'."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "kvcache"
    text = one_line(error.format_message()).removeprefix("Invalid value: ").rstrip(".")
    text = text.replace("Value error, ", "")
    text = text[:1].lower() + text[1:]
    if (value := _given(error, args)) is not None and value not in text:
        text = f"{text}; it is {value!r}"
    return f"{command}: {text}; {command} --help lists what there is"


def _given(error: Any, args: Sequence[str]) -> str | None:
    """The last value of the option that is wrong, which typer does not always name; None: there is none."""
    found = None
    for option in getattr(getattr(error, "param", None), "opts", ()):
        for word, after in zip(args, [*args[1:], None], strict=True):
            if word == option:
                found = after
            elif word.startswith(f"{option}="):
                found = word.removeprefix(f"{option}=")
    return found
