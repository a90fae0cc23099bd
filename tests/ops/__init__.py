"""Operators x properties: a row of `table.py` is an operator, and a file here is a property that all rows have."""
