"""What tests need of the machine: they are skipped without, and ``make test`` says so in its last line.

What Debian's packages bring, ``make test`` installs where it may: ``.ci/packages`` has them too.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterable

import pytest

from .rigs.servers import ValkeyServer

__all__ = ["NO_SERVER", "need_program", "need_server", "not_run", "wanting"]

PACKAGES = {"openssl": "openssl", "ip": "iproute2", "tc": "iproute2", "g++": "g++", "make": "make",
            "bash": "bash", "zsh": "zsh", "fish": "fish"}  # fmt: skip
"""Programs, and which of Debian's packages has each."""
INSTALL = "apt-get install "
WANT = re.compile(r"needs ([^:]+): (.+)")


def wanting(what: str, remedy: str = "") -> str:
    """A reason to skip a test, which ``not_run`` reads; by default ``what`` are Debian's packages."""
    return f"needs {what}: {remedy or INSTALL + what}"


NO_SERVER = wanting("redis-server")
"""Where neither valkey-server nor redis-server is installed."""


def need_program(name: str) -> str:
    """The path of a program; skips the test where it is not installed."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(wanting(PACKAGES[name]))
    return path


def need_server() -> None:
    """Skip the test where the client or the server of Valkey is not installed."""
    pytest.importorskip("valkey", reason="the package valkey is not installed")
    if ValkeyServer.program() is None:
        pytest.skip(NO_SERVER)


def not_run(reasons: Iterable[str]) -> str:
    """One line: how many tests did not run for want of what, and how to have it; empty where that is none.

    ``reasons``: of each test that was skipped.
    """
    wants = Counter(found.groups() for found in map(WANT.search, reasons) if found)
    if not wants:
        return ""
    packages = [remedy.removeprefix(INSTALL) for _, remedy in wants if remedy.startswith(INSTALL)]
    remedies = [INSTALL + " ".join(packages)] * bool(packages)
    remedies += [remedy for _, remedy in wants if not remedy.startswith(INSTALL)]
    counts = ", ".join(f"{what} ({count})" for (what, _), count in wants.most_common())
    return f"Tests that did not run for want of something: {counts}. To run them: {'; '.join(remedies)}"
