"""Fusion of whole models: `fuse` rewrites modules, the torch.compile backend "epigemm" rewrites Dynamo's graphs.

Both run the same pass (`rewrite.fuse_graph`): `operations` knows the spellings, `chains` matches them to epilogues, a
`Site` is one fused call that checks at every call that it may stand for what it replaced.
"""

from __future__ import annotations

from epigemm.fusion.model import fuse, unfuse
from epigemm.fusion.report import FusedSite, FusionReport, Skipped
from epigemm.fusion.site import watch

__all__ = ["FusedSite", "FusionReport", "Skipped", "fuse", "unfuse", "watch"]
