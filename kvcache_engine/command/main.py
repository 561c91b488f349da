"""Starts the ``kvcache`` command, whose parts are in kvcache_engine.command. This module imports without the
packages of the ``engine`` extra, so that it can report them missing, and quickly, so that Ctrl-C is handled
from the start.
"""

from __future__ import annotations

import io
import os
import sys

from kvcache_engine.command.exit_codes import INTERRUPTED

TYPE_CHECKING = False  # replaces typing's, which is expensive to import
if TYPE_CHECKING:
    from typing import Any

__all__ = ["app", "main"]

MISSING = "kvcache: {name} is not installed; the command needs: pip install 'ml-kvcache[engine]'"
_EXTRA = {"click", "rich", "typer"}

app: Any  # the typer application, loaded by __getattr__


def main() -> None:
    """Run the command and exit: 0, 1 for an error, 2 for wrong usage, 130 for Ctrl-C."""
    # For PyTorch's threads: they yield to other processes while they wait for each other.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # PyTorch allocates weights in huge pages where the system offers them: a CPU reads these 4% faster.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # Numba's coloured errors use colorama, which sends an escape to the terminal at exit.
    os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")
    try:
        before = _end_at_interrupt()
        _mend_streams()
        command = _app()
        _raise_at_interrupt(before)
        _exit_at_termination()
        try:
            command(prog_name="kvcache")
        finally:
            _flush()
            _end_at_interrupt()
    except KeyboardInterrupt:
        print("kvcache: interrupted", file=sys.stderr)  # noqa: T201
        sys.exit(INTERRUPTED)


def _end_at_interrupt() -> Any:
    """From now on, Ctrl-C prints a message and ends the process immediately; used while nothing can be lost.
    Python's default, an exception at an arbitrary point, is lost or printed with a traceback during an
    import. Returns the previous handler. Returns None and changes nothing if that was not Python's (a
    background job ignores Ctrl-C), and outside of the main thread, which alone receives signals.
    """
    import signal

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return None
    try:
        return signal.signal(signal.SIGINT, _end)
    except ValueError:  # not the main thread
        return None


def _raise_at_interrupt(before: Any) -> None:
    """Restore the handler ``before``."""
    import signal

    if before is not None:
        signal.signal(signal.SIGINT, before)


def _exit_at_termination() -> None:
    """SIGTERM, and SIGHUP when the terminal closes, end the command like an error, so that everything open is
    closed. The exit code is 128 + the signal's number, as in shells. A signal that is ignored, as under
    nohup, stays ignored; a second one has no effect.
    """
    import signal

    def leave(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + number)

    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            try:
                signal.signal(number, leave)
            except ValueError:  # not the main thread
                return


def _end(number: int, frame: object) -> None:
    try:
        os.write(2, b"kvcache: interrupted\n")
    finally:
        os._exit(INTERRUPTED)


def _mend_streams() -> None:
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # "?" replaces characters that the terminal lacks
            stream.reconfigure(errors="replace")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:  # noqa: SIM105 - importing contextlib takes longer than all of this module
            stream.flush()
        except (OSError, ValueError):  # Python reports it at exit
            pass


def _app() -> Any:
    try:
        from kvcache_engine.command.app import app
    except ModuleNotFoundError as error:
        name = (error.name or "").split(".")[0]
        if name not in _EXTRA:
            raise
        print(MISSING.format(name=name), file=sys.stderr)  # noqa: T201
        sys.exit(1)
    return app


def __getattr__(name: str) -> Any:
    if name == "app":
        return _app()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
