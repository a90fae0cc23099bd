"""Whole models, as they are and fused: ``python -m benchmarks --models``.

============  ====================================================================
``networks``  the models, plain PyTorch, and what goes in
``worker``    one process for each model and mode: compiles, checks, measures
``run``       starts the processes, lets one after another measure, writes the record
============  ====================================================================
"""
