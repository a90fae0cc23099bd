"""Fusion of whole models: one pass over Dynamo's graphs, `rewrite.fuse_graph`.

`fuse` runs such graphs operator by operator, the torch.compile backend "epigemm" has them compiled. At every matrix
product `chains` takes along what follows it element by element; `formula` makes it an epilogue, by the road of a
user's function; a `Site` is the call.

Imports: `explain`, `user_epilogue`, `route`, `operators`, `autograd`, `calls`, `packs`, `linking`, `planning`,
`arguments`, `epilogues`.
Taken by `explaining`.
"""

from __future__ import annotations

from epigemm.fusion.model import fuse, unfuse
from epigemm.fusion.report import FusedSite, FusionReport, Skipped, watch

__all__ = ["FusedSite", "FusionReport", "Skipped", "fuse", "unfuse", "watch"]
