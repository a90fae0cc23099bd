"""Benchmarks: the fused ops against what PyTorch users have today.

``python -m benchmarks`` measures every model of the problem set, checks each result against float64 before
its time counts, and prints one line per alternative. The rooms, in the order in which data passes through
them:

==================  ====================================================================================
``formulas``        each epilogue as plain PyTorch operations, with random parameters and our public call
``cases``           problem x shape x arithmetic: what is computed, and its input tensors
``pieces``          what dispatch says of fp32 on fp16 pieces, and the bytes that these take
``peers``           the alternatives: ours, eager, ``torch.compile``, cuBLASLt, QuACK, Triton; the yardsticks
``accuracy``        the float64 reference and the derived bound that every result is held against
``timing``          in turn (interleaved, cache flushed) and alone (after a pause)
``memory``          what an fp32 call allocates besides its result, and keeps
``records``         plain data classes: what was measured
``runner``          cases x peers -> records
``plans``           the sweep over every plan of the fused kernels (``plan_kernels``: the families of them)
``report``          records -> JSON, CSV, the console
``tables, plots``   JSON -> tables (console, Markdown) and PNG
``grid``            a sweep over powers of two, and every plan at its points: ``--grid``
``drawn``           the test of the choice, at random shapes: ``--random``
``host``            what a call costs the host, at the calls of ``host_cases``: ``--host``
``models``          whole models, as they are and fused: ``--models``
``custom``          epilogues of one Python function each (``custom_cases``, ``custom_peers``, ``custom_tables``)
                    and what their first call takes (``first_call``): ``--custom``
``gradings``        a benchmark of its own: the accuracy of the fp32 products
==================  ====================================================================================

Needs the extra: ``pip install epigemm[bench]`` (rich for tables, matplotlib for plots).
"""
