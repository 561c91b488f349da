"""The ``kvcache`` command: what it takes and what it shows.

The subcommands are in app.py, chat.py, inspection.py, saved.py, conformance.py; ranks.py is what a rank runs.
They take options.py (by groups: grouped.py) and prompts.py, and show by screen.py, progress.py,
json_output.py and chat_replies.py; completing.py is for shells. main.py starts it, and needs
the packages of the ``cli`` extra.
"""
