"""The peers' sources, whose tests and caches are run where they lie: none of their code is copied.

A peer's checkout in the folder ``PEERS_SRC`` (an environment variable) counts most, by its repository's name.
Otherwise the source distribution of the installed version is fetched from the package index, or its tag is
cloned from GitHub, once.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["NoSourceError", "checkout", "commit_of", "described", "installed", "source_of"]

REPOSITORIES = {
    "mlx-lm": "ml-explore/mlx-lm",
    "transformers": "huggingface/transformers",
    "lmcache": "LMCache/LMCache",
    "vllm": "vllm-project/vllm",
    "sglang": "sgl-project/sglang",
    "nano-vllm": "GeeeekExplorer/nano-vllm",
}
"""On GitHub."""
TAGGED = {"mlx-lm", "transformers", "sglang"}
"""Peers whose source distributions lack tests, or that have none: their tags are cloned."""
NANO_VLLM = "bb823b3e06983d71485a8e1f23715ebd87d98ef8"
"""No package index has it, and it has no tags."""
FETCHED = Path(__file__).parents[1] / ".peers"
"""What was fetched, by name and version."""


class NoSourceError(Exception):
    """A source that is not here and could not be fetched, and why."""


def installed(peer: str) -> str:
    """The version, of vLLM's build for CPUs too."""
    with contextlib.suppress(PackageNotFoundError):
        return version(peer)
    return version(f"{peer}-cpu")


def checkout(peer: str) -> Path | None:
    """The peer's checkout in ``PEERS_SRC``, if it has one."""
    folder = Path(os.environ.get("PEERS_SRC") or os.devnull, REPOSITORIES[peer].partition("/")[2])
    return folder if folder.is_dir() else None


def source_of(peer: str) -> Path:
    """The folder of the peer's source. Raises NoSourceError if there is none."""
    if (found := checkout(peer)) is not None:
        return found
    if peer == "nano-vllm":
        return _cloned(peer, NANO_VLLM)
    try:
        return _cloned(peer, f"v{installed(peer)}") if peer in TAGGED else _distributed(peer)
    except NoSourceError as error:
        if peer not in TAGGED:
            raise
        print(error, flush=True)
        return _distributed(peer)


def described(source: Path) -> str:
    """The commit of a checkout and its date; "" for what was fetched, which is of the installed version."""
    if source.parent == FETCHED or not (source / ".git").exists():
        return ""
    day = _run(["git", "-C", str(source), "log", "-1", "--format=%as"]).strip()
    return f"{commit_of(source)[:10]} of {day}"


def commit_of(source: Path) -> str:
    return _run(["git", "-C", str(source), "rev-parse", "HEAD"]).strip()


def _cloned(peer: str, ref: str) -> Path:
    folder = FETCHED / f"{peer}-{ref}"
    if not folder.is_dir():
        FETCHED.mkdir(exist_ok=True)
        url = f"https://github.com/{REPOSITORIES[peer]}"
        with tempfile.TemporaryDirectory(dir=FETCHED) as scratch:
            clone = Path(scratch) / "clone"
            _run(["git", "init", "--quiet", str(clone)])
            _run(["git", "-C", str(clone), "fetch", "--quiet", "--depth", "1", url, ref])
            _run(["git", "-C", str(clone), "checkout", "--quiet", "FETCH_HEAD"])
            clone.rename(folder)
    return folder


def _distributed(peer: str) -> Path:
    number = installed(peer)
    release = f"{peer.replace('-', '_')}-{number}"
    if not (FETCHED / release).is_dir():
        with tempfile.TemporaryDirectory() as folder:
            asked = f"--quiet --no-deps --no-build-isolation --no-binary {peer} --dest {folder}".split()
            # pip asks for metadata: vLLM's then needs no device, and does not add one to its version.
            told = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": number, "NO_CUDA_EXT": "1"}
            _run([sys.executable, "-m", "pip", "download", *asked, f"{peer}=={number}"], **told)
            with tarfile.open(Path(folder) / f"{release}.tar.gz") as archive:
                archive.extractall(FETCHED, filter="data")
    return FETCHED / release


def _run(command: list[str], **environment: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise NoSourceError(f"{' '.join(command)}: {last}")
    return done.stdout
