"""Makes `python examples/server` work from any folder."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

if not __package__:  # started as a folder: import ourselves as the package `server`, not as loose modules
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    __package__ = "server"

try:
    main = import_module(f"{__package__}.cli").main
except ModuleNotFoundError as error:
    name = str(error.name).partition(".")[0]
    if name not in ("jinja2", "starlette", "tokenizers", "uvicorn"):
        raise
    sys.exit(f"server: {name} is not installed: pip install 'ml-kvcache[server]'")

if __name__ == "__main__":
    sys.exit(main())
