"""What a call is given: its tensors, numbers and precision, the modes that hold for it, and whether they fit.

Imports: `epilogues`. Taken by all rooms that make, check or pass on a call.
"""
