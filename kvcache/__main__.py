"""``python -m kvcache`` is the ``kvcache`` command."""

from kvcache.command.main import main

if __name__ == "__main__":
    main()
