"""The ``kvcache`` command: its options and output.

app.py registers the subcommands; longer ones are in chat.py, inspection.py, saved.py, conformance.py and
generation.py, and ranks.py is what a rank runs. Input is in options.py (groups of options: grouped.py) and
prompts.py, output in screen.py, progress.py, json_output.py and chat_replies.py. reporting.py reports errors,
completing.py completes words in shells. main.py starts the command, and needs the packages of the ``engine``
extra.
"""
