"""Gradings: how accurate the fp32 products are, beside cuBLAS's SGEMM and TF32, all against float64.

``python -m benchmarks.gradings --output DIR`` runs all of them on a GPU and writes ``gradings.json`` and plots. The
tests use the same functions and hold their results to limits. ``docs/numerics.md`` explains what is measured and why.

=============  =========================================================================================
``data``       the classes of inputs: uniform, normal, positive, wide, scaled rows and columns, outliers, sparse
``measures``   the float64 reference and the errors of a result against it
``bounds``       what the split and the scaled product may be off by, derived
``products``   the products that are graded: SGEMM, TF32, the split and scaled kernels by force, the public function
``sweep``      every class over K and seeds; the smallest K from which an arithmetic is as accurate as its baseline
``exact``      integers, Demmel's exact zeros and circulant test, worst cases of the split
``special``    infinities, NaN, subnormal numbers, overflow: what must stand where
``show``       tables and plots
``cli``        the command
=============  =========================================================================================
"""
