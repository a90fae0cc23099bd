"""Calls that autograd records: their nodes, and the derivatives of all calls.

Imports: `calls` and what that may import. Taken by `operators`, `route`, `explain`.
"""
