"""`epigemm.explain`: what a call would run, and why: the text of a log of calls.

Imports: the public functions, `batch_statistics`, `autograd`, `calls`, `planner`. Taken by `tuner`, `fusion`,
`explanations`.
"""

from epigemm.explain.answer import Explanation, ModuleExplanation

__all__ = ["Explanation", "ModuleExplanation"]
