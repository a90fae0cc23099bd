"""Whole models, ``--models``: `networks` in plain PyTorch, and the `worker` that measures one."""
