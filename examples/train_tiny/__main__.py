"""Makes `python examples/train_tiny` work from any folder."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

if not __package__:  # started as a folder: import ourselves as the package `train_tiny`, not as loose modules
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    __package__ = "train_tiny"

try:
    main = import_module(f"{__package__}.train").main
except ModuleNotFoundError as error:
    name = str(error.name).partition(".")[0]
    if name not in ("safetensors", "tokenizers", "torch"):
        raise
    needed = "'torch>=2.9' numpy tokenizers safetensors"
    sys.exit(f"train_tiny: {name} is not installed: pip install {needed}")

if __name__ == "__main__":
    sys.exit(main())
