"""What follows a product: operands and their kinds, the registry, and how a Python function becomes an epilogue.

Imports: `_native`. Taken by everybody.
"""
