"""What may not change unseen while the code behind it moves.

Each kind is a file of text, and `python -m tests.net.update` rewrites it: `api.txt` (names, signatures, defaults),
`errors.txt` (messages), `plans.txt` (what dry runs choose on described GPUs), `budgets.txt` (bounds that only fall).
Three are written by hand: `removals.txt` (names that are meant to go), `programs.txt` and `refused.txt` (bad calls).
"""
