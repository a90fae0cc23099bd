"""Fusion of whole models: one pass over Dynamo's graphs, `rewrite.fuse_graph`.

`fuse` runs the rewritten graphs operator by operator. The torch.compile backend "epigemm" has them compiled. A chain is
a matrix product and the pointwise operators that follow it (`chains`). `formula` makes an epilogue of the operators, in
the same way as of a user's function. A `Site` is the fused call that replaces a chain.

Imports: `explain`, `groups`, `decorator`, `batch_statistics`, `route`, `operators`, `autograd`, `calls`, `linker`,
`planner`, `arguments`, `epilogues`.
Taken by `explanations`.
"""

from __future__ import annotations

from epigemm.fusion.model import fuse, unfuse
from epigemm.fusion.report import FusedSite, FusionReport, Skipped

__all__ = ["FusedSite", "FusionReport", "Skipped", "fuse", "unfuse"]
