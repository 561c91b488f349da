"""``python -m kvcache_engine`` is the ``kvcache`` command."""

from kvcache_engine.command.main import main

if __name__ == "__main__":
    main()
