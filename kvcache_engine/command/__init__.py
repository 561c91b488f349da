"""The ``kvcache`` command: its options and output.

app.py has the subcommands together; those of more than a page are in chat.py, inspection.py, saved.py,
conformance.py and generation.py, and ranks.py is what a rank runs. They take options.py (by groups:
grouped.py) and prompts.py, and show by screen.py, progress.py, json_output.py and chat_replies.py;
reporting.py tells errors, completing.py is for shells. main.py starts it, and needs the packages of the
``engine`` extra.
"""
