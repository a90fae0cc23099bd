"""Whole models, ``--models``: `networks`, `unseen` and `vision` in plain PyTorch, all of them named in `registry`."""
