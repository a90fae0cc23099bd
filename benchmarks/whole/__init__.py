"""Whole models against eager and torch.compile: ``python -m benchmarks.whole.run --output DIR``."""
