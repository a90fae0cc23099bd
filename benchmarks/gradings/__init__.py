"""Gradings: how accurate the fp32 products are, beside cuBLAS's SGEMM and TF32, all against float64.

``python -m benchmarks.gradings --output DIR`` runs all of them on a GPU. The tests use the same functions and hold
their results to limits. ``docs/numerics.md`` explains what is measured and why.
"""
