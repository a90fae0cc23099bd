"""Whole models, ``python -m benchmarks --models``: `networks` in plain PyTorch, and the `worker` that measures one."""
