"""epigemm within other libraries, which are imported when they are asked for.

Imports: `groups`, `nn`. Taken by users.
"""
