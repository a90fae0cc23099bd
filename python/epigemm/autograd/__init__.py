"""Calls that autograd records: their nodes, and the derivatives of all calls.

Imports: `epilogues`, `arguments`, `planner`, `packs`, `calls`. Taken by `operators`, `route`, `batch_statistics`,
`explain`, `fusion`, `glu`, `nn`.
"""
