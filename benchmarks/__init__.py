"""Benchmarks: the fused ops against what PyTorch users have today. Run from a checkout: ``python -m benchmarks``.

Each result is checked against float64 before its time counts. The rooms, in the order in which data passes through:

==============  ========================================================================================
``cases``       what is computed, as data: the five models, epilogues in Python, pairs of products, random shapes, calls
                that the host is timed for
``baselines``   the alternatives: ours, eager, ``torch.compile``, cuBLASLt, QuACK; the bare product
``cutlass``     CUTLASS 2.x's device GEMM, which is compiled when it is measured
``harness``     accuracy against float64, the steps of a measurement, the one writer of records and tables, plots;
                the timer is `benchmarks.harness.timing`
``kinds``       the records: which cases, which ratios, what is wanted of them
``models``      whole models, as they are and fused: ``--models``
``gradings``    the accuracy of the fp32 products: ``python -m benchmarks.gradings``
``results``     the records that the documentation quotes
==============  ========================================================================================

Needs the extra: ``pip install epigemm[bench]`` (rich for tables, matplotlib for plots).
"""
