"""`epigemm.explain`: what a call would run, and why, without running it.

Imports: the public functions, `batch_statistics`, `route`, `autograd`, `calls`, `planning`. Taken by `tuning`,
`fusion`, `explaining`.
"""

from epigemm.explain.explained import Explanation
from epigemm.explain.explanation import explain
from epigemm.explain.products import ModuleExplanation

__all__ = ["Explanation", "ModuleExplanation", "explain"]
