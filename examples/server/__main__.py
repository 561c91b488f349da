"""Makes `python examples/server` work from any folder."""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # started as a folder: import ourselves as the package `server`, not as loose modules
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from server.cli import main
else:
    from .cli import main

if __name__ == "__main__":
    sys.exit(main())
