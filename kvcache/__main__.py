"""``python -m kvcache`` is the ``kvcache`` command."""

from kvcache.cli import main

if __name__ == "__main__":
    main()
