"""What may not change unseen while the code behind it moves.

Each kind is a file of text, and `python -m tests.net.update` rewrites it: `api.txt` (names, signatures, defaults),
`errors.txt` (messages), `explanations.txt` (what `explain` says), `plans.txt` (what dry runs choose on described GPUs),
`budgets.txt` (bounds that only fall). Written by hand are `removals.txt` (names that are meant to go), `programs.txt`,
`refused.txt` and `models.txt` (bad calls, and models), and `asked.txt` (what is explained).
"""
