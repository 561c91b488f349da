"""The ``kvcache`` command: what it takes (options.py, prompts.py) and what it shows (screen.py, progress.py).

The subcommands are in app.py, chat.py, inspection.py, saved.py, conformance.py; ranks.py is what a rank runs.
It is started by kvcache/cli.py, and needs the packages of the ``cli`` extra.
"""
