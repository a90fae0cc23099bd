"""Whole models, ``--models``, and the problems of a checkout, ``--kernelbench``.

===============  ==============================================================
``networks``     models in plain PyTorch, also in ``unseen`` and ``vision``
``registry``     all of them by name, with their batches
``jobs``         what there is to measure
``pool``         processes for jobs, in waves
``worker``       one job in its process: prepared, checked
``measures``     and measured
``figures``      outcomes -> record, several records -> one
``kernelbench``  problems in their own harness, in place of ``worker`` and ``jobs``
===============  ==============================================================
"""
