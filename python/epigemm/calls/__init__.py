"""One call: the entry to C++, and the cold path where something stands in the way of a result.

Imports: `epilogues`, `arguments`, `planning`, `linking`, `packs`. Taken by `autograd`, `operators`,
`route` and what measures or explains calls.
"""
