"""`epigemm.explain`: what a call would run, and why, without running it.

Imports: the public functions, `autograd`, `calls`, `planning`. Taken by `tuning`.
"""

from epigemm.explain.explanation import Explanation, explain

__all__ = ["Explanation", "explain"]
